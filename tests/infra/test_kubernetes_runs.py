"""A Ray cluster for one run, made and ended by the scheduler's account in a real API server."""

import json
import os
import subprocess
import sys

import pytest

from pipelines.core.settings import PROJECT
from tests.infra.kubernetes.control_plane import ControlPlane
from tests.infra.kubernetes.overlays import NAMESPACE

pytestmark = [pytest.mark.infra, pytest.mark.timeout(900)]

RUN = "Debug-20261123T015108-453a"
HERE = f"--namespace={NAMESPACE}"
# The script, with the account's files where this test has put them.
SCRIPT = """
import runpy, sys, pathlib
sys.argv = sys.argv[1:]
module = runpy.run_path(sys.argv[0])
module["kubernetes"].__globals__["ACCOUNT"] = pathlib.Path(sys.argv[2])
module[sys.argv[1]](module["kubernetes"](), sys.argv[3])
"""


@pytest.fixture
def account(platform: ControlPlane, tmp_path):
    """What a pod of the scheduler's finds where service accounts' files are."""
    (tmp_path / "token").write_text(platform.token_of(NAMESPACE, "airflow"))
    (tmp_path / "ca.crt").write_bytes((platform.folder / "pki" / "ca.crt").read_bytes())
    return tmp_path


def start(platform: ControlPlane, action: str, account, **changes: str) -> subprocess.Popen[str]:
    script = PROJECT / "infra" / "kubernetes" / "run_cluster.py"
    environment = {
        "KUBERNETES_SERVICE_HOST": platform.address,
        "KUBERNETES_SERVICE_PORT": "6443",
        "PENSTOCK_WORKERS": "9",
        "PENSTOCK_RAY_ADDRESS_FILE": str(account / "ray-address"),
        "PENSTOCK_RUN_PRIORITY": "high",
    }
    return subprocess.Popen(
        [
            *("nsenter", f"--net=/run/netns/{platform.space}"),
            *(sys.executable, "-c", SCRIPT, script, action, account, RUN),
        ],
        env=os.environ | environment | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said


def of_runs(platform: ControlPlane) -> list[str]:
    found = platform.get(HERE, "rayclusters")
    return [each["metadata"]["name"] for each in found if each["metadata"]["name"] != "ray"]


def say_ready(platform: ControlPlane, name: str, workers: int) -> None:
    """As KubeRay's operator would."""
    stored = platform.get(HERE, "raycluster", name)
    head = {
        "type": "HeadPodReady",
        "status": "True",
        "reason": "Running",
        "message": "ready",
        "lastTransitionTime": "2026-11-23T00:00:00Z",
    }
    path = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters/{name}/status"
    status = {"conditions": [head], "readyWorkerReplicas": workers}
    platform.kubectl(
        *("replace", "--raw", path, "--filename=-"), stdin=json.dumps(stored | {"status": status})
    )


def test_a_run_has_a_cluster_of_its_own_and_it_goes(platform: ControlPlane, account) -> None:
    up = start(platform, "up", account)
    platform.wait_for(lambda: of_runs(platform))
    (name,) = of_runs(platform)
    cluster = platform.get(HERE, "raycluster", name)
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert (group["groupName"], group["replicas"]) == ("gpu", 2)  # of eight GPUs each
    labels = cluster["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "penstock"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    assert "enableInTreeAutoscaling" not in cluster["spec"]
    say_ready(platform, name, 1)
    assert up.poll() is None
    say_ready(platform, name, 2)
    assert "1 of 2 nodes are ready" in (said := ended(up)) or "head is not ready" in said
    address = f"https://{name}.{NAMESPACE}.svc:8443"
    assert (account / "ray-address").read_text().strip() == address
    selector = platform.get(HERE, "service", name)["spec"]["selector"]
    assert selector == {"ray.io/cluster": name, "app.kubernetes.io/name": "ray-head"}

    ended(start(platform, "up", account))  # a second time it finds all of it
    assert of_runs(platform) == [name]
    for _ in range(2):
        ended(start(platform, "down", account))
        assert of_runs(platform) == []
    platform.wait_for(
        lambda: platform.try_kubectl("get", HERE, "service", name).returncode
    )  # with its owner


def test_where_the_group_is_unknown_it_says_so(platform: ControlPlane, account) -> None:
    up = start(platform, "up", account, PENSTOCK_RUN_GROUP="tpu")
    said, _ = up.communicate(timeout=60)
    assert up.returncode == 1
    assert "error: run-group 'tpu'" in said
    assert of_runs(platform) == []
