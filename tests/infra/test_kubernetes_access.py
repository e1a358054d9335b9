"""What the platform's accounts may do, and who reaches whom, in a real API server."""

import pytest

from tests.infra.kubernetes.control_plane import ControlPlane, Resource
from tests.infra.kubernetes.network_policies import Place, Policies
from tests.infra.kubernetes.operators import NEIGHBOURS, kind_of
from tests.infra.kubernetes.overlays import NAMESPACE

pytestmark = [pytest.mark.infra, pytest.mark.timeout(3600)]

# What KubeRay 1.7 binds to the account of a head that autoscales, and nothing else is bound.
AUTOSCALER = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "patch"]},
    {"apiGroups": [""], "resources": ["pods/resize"], "verbs": ["patch"]},
    {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["get", "patch"]},
]
ACCOUNTS = (
    *("default", "airflow", "mlflow", "ray", "ray-worker"),
    *("airflow-on-ray", "dashboard-on-ray"),
)
ASKED = (
    "get secrets",
    "list secrets",
    "get configmaps",
    "get pods",
    "list pods",
    "patch pods",
    "create pods",
    "delete pods",
    "create pods/exec",
    "create serviceaccounts/token",
    "create services",
    "patch services",
    "get rayclusters.ray.io",
    "create rayclusters.ray.io",
    "patch rayclusters.ray.io",
    "delete rayclusters.ray.io",
    "get clusters.postgresql.cnpg.io",
    "delete persistentvolumeclaims",
    "create rolebindings.rbac.authorization.k8s.io",
    "list nodes",
    "list namespaces",
    "ray:write rayclusters.ray.io/ray",
    "ray:write rayclusters.ray.io/run-0123456789ab",
    "create tokenreviews.authentication.k8s.io",
    "create subjectaccessreviews.authorization.k8s.io",
)
# Of the whole cluster, not of a namespace.
REVIEWS = {
    "create tokenreviews.authentication.k8s.io",
    "create subjectaccessreviews.authorization.k8s.io",
}
EVERY_RAY = {
    "ray:write rayclusters.ray.io/ray",
    "ray:write rayclusters.ray.io/run-0123456789ab",
}
ALLOWED = {
    "airflow-on-ray": EVERY_RAY,
    "ray-worker": EVERY_RAY | REVIEWS,
    "dashboard-on-ray": {"ray:write rayclusters.ray.io/ray"},
    "airflow": {
        "create services",
        "get rayclusters.ray.io",
        "create rayclusters.ray.io",
        "delete rayclusters.ray.io",
    },
    "ray": {
        "get pods",
        "list pods",
        "patch pods",
        "get rayclusters.ray.io",
        "patch rayclusters.ray.io",
    },
}


@pytest.fixture(scope="module")
def with_kuberay(platform: ControlPlane) -> ControlPlane:
    metadata = {"name": "ray", "namespace": NAMESPACE}
    group = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": AUTOSCALER}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": metadata,
        "subjects": [{"kind": "ServiceAccount", "name": "ray", "namespace": NAMESPACE}],
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "ray"},
    }
    platform.apply(role, binding)
    return platform


def test_the_table_has_each_account(platform: ControlPlane) -> None:
    accounts = platform.get(f"--namespace={NAMESPACE}", "serviceaccounts")
    assert {each["metadata"]["name"] for each in accounts} == set(ACCOUNTS)


@pytest.mark.parametrize("account", ACCOUNTS)
def test_what_an_account_may_do(with_kuberay: ControlPlane, account: str) -> None:
    who = f"--as=system:serviceaccount:{NAMESPACE}:{account}"
    answers = {}
    for question in ASKED:
        done = with_kuberay.try_kubectl(
            "auth", "can-i", *question.split(), f"--namespace={NAMESPACE}", who
        )
        answer = done.stdout.strip().split(" ")[0]
        assert answer in ("yes", "no"), done.stderr
        answers[question] = answer
        if question in REVIEWS:
            continue
        # What it may do, it may do in its own namespace only.
        elsewhere = with_kuberay.kubectl(
            "auth", "can-i", *question.split(), "--namespace=other-team", who, check=False
        )
        assert elsewhere.startswith("no"), f"{account}: {question} in another namespace"
    allowed = {question for question, answer in answers.items() if answer == "yes"}
    assert allowed == ALLOWED.get(account, set())


def test_tokens_of_accounts_are_in_no_pod_that_needs_none(platform: ControlPlane) -> None:
    pods = platform.get(f"--namespace={NAMESPACE}", "pods")
    with_token = {
        kind_of(pod)
        for pod in pods
        for volume in pod["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
        if "serviceAccountToken" in source
    }
    ours = {kind_of(pod): pod["spec"] for pod in pods}
    mounted = {
        name
        for name, spec in ours.items()
        for container in spec["containers"]
        for mount in container.get("volumeMounts", [])
        if mount["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    }
    assert with_token == {"ray-head", "scheduler"}
    # Ray's nodes have that of ray-worker. The head's own, which may raise pods, only KubeRay's
    # autoscaler mounts; the others' pods are not of our manifests.
    nodes = {"ray-head", *WORKERS}
    assert mounted - {"postgres", "stranger"} == {"scheduler", *nodes}
    assert {_token_of(ours[node]) for node in nodes} == {"ray-worker-token"}


def _token_of(pod: Resource) -> str:
    (volume,) = [each for each in pod["volumes"] if each["name"] == "ray-token"]
    mounts = [each["name"] for each in pod["containers"][0]["volumeMounts"]]
    assert (mounts.count("ray-token"), mounts.count("account")) == (2, 0)
    name: str = volume["secret"]["secretName"]
    return name


AIRFLOW = ("airflow-prepare", "api-server", "scheduler", "dag-processor", "triggerer", "reconciler")
WORKERS = ("ray-worker-cpu", "ray-worker-gpu")
BEYOND = {
    "object-store": "10.1.0.7",
    "kubernetes": "10.2.0.2",
    "database": "10.3.0.3",
    "login": "10.4.0.4",
    "internet": "203.0.113.9",
    "own-network": "10.99.0.1",
    "machine-metadata": "169.254.169.254",
}
PORTS = (
    *(22, 53, 80, 443, 5000, 5432, 6379, 6443, 8000, 8080, 8265, 8443, 8444, 9000, 9090),
    *(9101, 10001),
)
ANY = frozenset(PORTS)
DNS = {"dns": {53}}
STORE = {"object-store": {9000}}
DATABASE = {"database": {5432}}
# `mlflow-prepare` listens nowhere, and ends; the policy of MLflow is for both.
MLFLOW = {"mlflow": {5000}, "mlflow-prepare": {5000}}
INTERNET = {"internet": {443}}
API = {"kubernetes": {443, 6443}}
LOGIN = {"login": {443}}
TELEMETRY = {"prometheus": {9090}}
OF_AIRFLOW = (
    {"api-server": {8080}, "ray-head": {8443}, "postgres": {5432}}
    | MLFLOW
    | DNS
    | STORE
    | DATABASE
    | INTERNET
    | TELEMETRY
)
OF_RAY = {"ray-head": ANY} | MLFLOW | dict.fromkeys(WORKERS, ANY) | DNS | STORE | INTERNET
OF_MLFLOW = {"postgres": {5432}} | DNS | STORE | DATABASE
# From whom to whom and on which ports; what isn't listed is closed.
REACHED: dict[str, dict[str, set[int] | frozenset[int]]] = {
    **dict.fromkeys(AIRFLOW, OF_AIRFLOW),
    "api-server": OF_AIRFLOW | LOGIN,
    "scheduler": OF_AIRFLOW | API,
    "mlflow": OF_MLFLOW | LOGIN,
    "mlflow-prepare": OF_MLFLOW,
    "ray-head": OF_RAY | API | {"redis": {6379}},
    **dict.fromkeys(WORKERS, OF_RAY | API),
    "ray-dashboard": DNS | {"ray-head": {8443}, "mlflow": {5000}},
    "postgres": DNS | API | STORE | {"postgres": ANY},
    "redis": DNS,
    "stranger": DNS,
    "gateway": {"api-server": {8080}, "mlflow": {5000}, "ray-dashboard": {8444}},
    "prometheus": {name: {8080} for name in ("ray-head", *WORKERS)} | {"mlflow": {9101}},
    "postgres-operator": {"postgres": {8000}},
    "other-team": {},
    "dns": {},
}


@pytest.fixture(scope="module")
def places(platform: ControlPlane) -> dict[str, Place]:
    """One pod of each kind, and addresses beyond the cluster."""
    namespaces = {each["metadata"]["name"]: each for each in platform.get("namespaces")}
    found = {}
    for pod in platform.get("pods", "--all-namespaces"):
        namespace = namespaces[pod["metadata"]["namespace"]]
        found[kind_of(pod)] = Place.of_pod(pod, namespace)
    return found | {name: Place(address=address) for name, address in BEYOND.items()}


def test_who_reaches_whom(platform: ControlPlane, places: dict[str, Place]) -> None:
    assert set(places) == {*REACHED, *BEYOND}
    policies = Policies(platform)
    ours = {name for name in REACHED if name not in NEIGHBOURS or name == "stranger"}
    found = {}
    for source in REACHED:
        # What neighbours do among themselves is theirs.
        targets = [name for name in places if source in ours or name in ours]
        reached = {
            target: {p for p in PORTS if policies.let(places[source], places[target], p)}
            for target in targets
        }
        found[source] = {target: ports for target, ports in reached.items() if ports}
    assert found == REACHED


def test_the_table_would_tell(platform: ControlPlane, places: dict[str, Place]) -> None:
    policies = Policies(platform)
    assert not policies.let(places["stranger"], places["mlflow"], 5000)
    platform.kubectl("delete", "networkpolicy", f"--namespace={NAMESPACE}", "--all")
    assert Policies(platform).let(places["stranger"], places["mlflow"], 5000)
