"""Drains and upgrades of the platform in a real API server: what goes, what waits, what stays."""

import json
from pathlib import Path

import pytest
import yaml

from tests.infra.conftest import ADDRESSES
from tests.infra.kubernetes.control_plane import ControlPlane, Resource
from tests.infra.kubernetes.operators import NODE, kind_of
from tests.infra.kubernetes.overlays import (
    FULLEST,
    NAMESPACE,
    components,
    for_older,
    render_with,
)

pytestmark = [pytest.mark.infra, pytest.mark.timeout(3600)]

# Whether a drain may end one pod of each kind, while all of them are ready.
MAY_GO = {
    "api-server": True,
    "dag-processor": True,
    "mlflow": True,
    "ray-dashboard": True,
    "ray-worker-cpu": True,
    "ray-worker-gpu": True,
    "reconciler": True,
    "redis": True,
    "triggerer": True,
    # Their end cuts tasks off: a drain waits for a user.
    "ray-head": False,
    "scheduler": False,
}
# What holds state, or whose end is the end of what does.
STATE = (
    "persistentvolumeclaims",
    "statefulsets",
    "rayclusters",
    "clusters.postgresql.cnpg.io",
    "databases.postgresql.cnpg.io",
    "services",
    "certificates.cert-manager.io",
    "externalsecrets",
    "serviceaccounts",
)


@pytest.fixture
def counted(platform: ControlPlane) -> ControlPlane:
    """The platform after the controllers have counted its ready pods."""

    def all_counted() -> bool:
        budgets = platform.get(f"--namespace={NAMESPACE}", "poddisruptionbudgets")
        states = [each.get("status", {}) for each in budgets]
        return all(
            state.get("currentHealthy", 0) and state["currentHealthy"] == state["expectedPods"]
            for state in states
        )

    platform.wait_for(all_counted)
    return platform


def evicted(plane: ControlPlane, name: str) -> bool:
    """Whether the server would let this pod be evicted."""
    metadata = {"name": name, "namespace": NAMESPACE}
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": metadata}
    eviction["deleteOptions"] = {"dryRun": ["All"]}
    done = plane.try_kubectl(
        *("create", "--filename=-"),
        *("--raw", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction?dryRun=All"),
        stdin=json.dumps(eviction),
    )
    if done.returncode:
        assert "disruption budget" in done.stderr, done.stderr
    return done.returncode == 0


def of_operators(pod: Resource) -> bool:
    """Whether an operator looks after the pod, with a budget of its own."""
    return "cnpg.io/cluster" in pod["metadata"].get("labels", {})


def test_which_pods_a_drain_may_end(counted: ControlPlane) -> None:
    pods = counted.get(f"--namespace={NAMESPACE}", "pods")
    ours = {
        kind_of(pod): pod["metadata"]["name"]
        for pod in pods
        if "ownerReferences" in pod["metadata"] and not of_operators(pod)
    }
    long_lived = {kind: name for kind, name in ours.items() if not kind.endswith("-prepare")}
    assert {kind: evicted(counted, name) for kind, name in long_lived.items()} == MAY_GO


def test_a_second_replica_stays_while_the_first_is_away(counted: ControlPlane) -> None:
    pods = counted.get(f"--namespace={NAMESPACE}", "pods")
    first, second = (pod["metadata"]["name"] for pod in pods if kind_of(pod) == "mlflow")
    assert evicted(counted, second)
    counted.say_ready(NAMESPACE, first, ready=False)
    try:
        counted.wait_for(lambda: not evicted(counted, second))
    finally:
        counted.say_ready(NAMESPACE, first)
    counted.wait_for(lambda: evicted(counted, second))


def test_a_drain_names_what_it_waits_for(counted: ControlPlane) -> None:
    done = counted.try_kubectl(
        *("drain", NODE, "--dry-run=server", "--ignore-daemonsets", "--delete-emptydir-data"),
        *("--force", "--timeout=15s"),
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error when evicting")]
    refused = {line.split('"')[1] for line in lines}
    assert {name for name in refused if not name.startswith("scheduler-")} == {"ray-head"}
    assert len(refused) == 2


@pytest.fixture
def next_version(tmp_path: Path) -> list[Resource]:
    """Other images of ours, and another setting of all clients and of Airflow."""
    images = yaml.safe_load((FULLEST / "kustomization.yaml").read_text())["images"]
    for image in images:
        if image["name"].startswith("penstock-"):
            image |= {"digest": "sha256:" + "1" * 64}
    setting = {"name": "clients", "namespace": NAMESPACE, "behavior": "merge"}
    setting |= {"literals": ["PENSTOCK_NEW_SETTING=1"]}
    values = ADDRESSES | {"airflow-tasks": "64"}
    more = {"images": images, "configMapGenerator": [setting]}
    return for_older(render_with(tmp_path, *components(), values=values, **more))


def stored(plane: ControlPlane, kinds: str) -> dict[tuple[str, str], Resource]:
    """What the server says of each resource: its identity, and how often it was changed."""
    found = plane.get(f"--namespace={NAMESPACE}", kinds)
    return {(each["kind"], each["metadata"]["name"]): each["metadata"] for each in found}


def install(plane: ControlPlane, resources: list[Resource]) -> None:
    """As infra/kubernetes/install.py does: a job can't be changed, so the last one goes first."""
    jobs = ("airflow-prepare", "mlflow-prepare")
    plane.kubectl("delete", "job", f"--namespace={NAMESPACE}", *jobs)
    plane.apply(*resources)


def test_the_same_version_again_changes_nothing(platform: ControlPlane, tmp_path: Path) -> None:
    kinds = ",".join((*STATE, "deployments"))
    before = stored(platform, kinds)
    install(platform, for_older(render_with(tmp_path, *components(), values=ADDRESSES)))
    after = stored(platform, kinds)
    for key, each in after.items():
        same = {name: each.get(name) for name in ("uid", "generation")}
        assert same == {name: before[key].get(name) for name in ("uid", "generation")}, key


def test_an_upgrade_makes_nothing_anew_that_holds_state(
    platform: ControlPlane, next_version: list[Resource]
) -> None:
    state = ",".join(STATE)
    before, rolled = stored(platform, state), stored(platform, "deployments")
    install(platform, next_version)
    after = stored(platform, state)

    assert {key: each["uid"] for key, each in after.items()} == {
        key: each["uid"] for key, each in before.items()
    }
    changed = {
        key for key in after if after[key].get("generation") != before[key].get("generation")
    }
    assert changed == {("RayCluster", "ray")}  # whose pods run another image
    (ray,) = platform.get(f"--namespace={NAMESPACE}", "rayclusters")
    # An old Ray would not know a new Airflow's jobs.
    assert ray["spec"]["upgradeStrategy"] == {"type": "Recreate"}
    rolled.pop(("Deployment", "ray-dashboard"))  # runs no image of ours
    now = stored(platform, "deployments")
    for key, each in rolled.items():
        assert now[key]["generation"] > each["generation"], f"{key} runs the old version"
