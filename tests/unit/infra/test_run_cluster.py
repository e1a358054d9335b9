"""What the script for a run's own Ray cluster makes, and how it takes a Kubernetes that errs."""

import importlib.util
import json
from fnmatch import fnmatch
from types import ModuleType

import httpx
import pytest

from tests.unit.infra.custom_resources import problems
from tests.unit.infra.manifests import FOLDER, Resource, config, one, render

RUN = "Debug-20261123T015108-453a"
READY = {"conditions": [{"type": "HeadPodReady", "status": "True"}], "readyWorkerReplicas": 9}


@pytest.fixture
def script(monkeypatch, tmp_path) -> ModuleType:
    monkeypatch.setenv("PENSTOCK_RUN", RUN)
    monkeypatch.setenv("PENSTOCK_WORKERS", "9")
    monkeypatch.setenv("PENSTOCK_RAY_ADDRESS_FILE", str(tmp_path / "ray-address"))
    spec = importlib.util.spec_from_file_location("run_cluster", FOLDER / "run_cluster.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ASK_EVERY_S = 0
    return module


@pytest.fixture
def resources() -> list[Resource]:
    return render("kueue", "redis", "run-clusters")


@pytest.fixture
def platform(resources) -> Resource:
    ray = one(resources, "RayCluster", "ray")
    return ray | {"metadata": ray["metadata"] | {"uid": "1"}}


def test_it_is_the_platforms_cluster_with_nodes_for_one_run(script, platform):
    cluster = script.cluster_for(platform, RUN, 9, "high")
    assert problems(cluster) == []
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert (group["groupName"], group["replicas"]) == ("gpu", 2)  # of eight GPUs each
    assert cluster["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "penstock",
        "kueue.x-k8s.io/priority-class": "high",
    }
    # An owner that Kueue or KubeRay took for the one who manages it would keep it out of the queue.
    (owner,) = cluster["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "ray", "uid": "1"}
    changed = {"enableInTreeAutoscaling", "autoscalerOptions", "workerGroupSpecs", "headGroupSpec"}
    same = {key: value for key, value in platform["spec"].items() if key not in changed}
    assert same == {key: cluster["spec"][key] for key in cluster["spec"].keys() - changed}


def test_its_priority_is_a_class_that_the_queues_have(resources):
    classes = [r for r in render(overlay="queues") if r["kind"] == "WorkloadPriorityClass"]
    names = {each["metadata"]["name"] for each in classes}
    assert config(resources, "airflow")["PENSTOCK_RUN_PRIORITY"] in names


def made(path: str, resource: Resource) -> Resource:
    return resource | {"metadata": resource["metadata"] | {"uid": path}}


def answering(script, monkeypatch, platform, *looks) -> None:
    """A Kubernetes that makes what is asked for, and answers the looks at it one after another."""
    left = list(looks)

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.endswith("/rayclusters/ray"):
            return httpx.Response(200, json=platform)
        if request.method == "POST":
            return httpx.Response(201, json=made(path, json.loads(request.content)))
        look = left.pop(0)
        if isinstance(look, Exception):
            raise look
        return look

    client = httpx.Client(base_url="https://api", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(script, "kubernetes", lambda: client)


def test_a_kubernetes_that_is_away_costs_no_run_its_nodes(
    script, platform, resources, monkeypatch, tmp_path
):
    cluster = script.cluster_for(platform, RUN, 9, "high")
    looks = (
        httpx.Response(503),
        httpx.ConnectError("refused"),
        httpx.Response(200, json=cluster | {"status": READY}),
    )
    answering(script, monkeypatch, platform, *looks)
    monkeypatch.setattr("sys.argv", ["run_cluster.py", "up"])
    script.main()
    address = httpx.URL((tmp_path / "ray-address").read_text().strip())
    names = one(resources, "Certificate", "ray-https")["spec"]["dnsNames"]
    assert any(fnmatch(address.host, name) for name in names)


def test_what_kubernetes_refuses_is_one_line(script, platform, monkeypatch):
    forbidden = httpx.Response(403, json={"message": "rayclusters is forbidden"})
    answering(script, monkeypatch, platform, forbidden)
    monkeypatch.setattr("sys.argv", ["run_cluster.py", "down"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    line = str(ended.value)
    assert line.startswith("error: Kubernetes answered 403 to DELETE /apis/ray.io")
    assert "rayclusters is forbidden" in line
    assert "\n" not in line
