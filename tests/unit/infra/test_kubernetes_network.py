"""Who reaches whom by the manifests' network policies, and by which way users come in."""

from typing import Any

import pytest

from tests.unit.infra.manifests import Resource, config, one, pods, render

ANYWHERE = "0.0.0.0/0"
S3, API, DATABASE = "10.1.0.0/24", "10.2.0.0/28", "10.3.0.0/28"
# Beyond the pods: the component, who may go there and where that is. `who` by the pods' templates.
AIRFLOW = {"airflow-prepare", "api-server", "scheduler", "dag-processor", "triggerer", "reconciler"}
MLFLOW = {"mlflow", "mlflow-prepare"}
RAY = {"ray-head", "ray-cpu", "ray-gpu"}
BEYOND = {
    (S3, 9000): AIRFLOW | MLFLOW | RAY,
    (API, 443): {"ray-head"},
    (API, 6443): {"ray-head"},
    (DATABASE, 5432): AIRFLOW | MLFLOW,
    (ANYWHERE, 443): AIRFLOW | RAY,
}


@pytest.fixture(scope="module")
def resources() -> list[Resource]:
    from tests.unit.infra.test_kubernetes_values import changed

    cidrs = {"s3-cidr": S3, "kubernetes-api-cidr": API, "database-cidr": DATABASE}
    return render("managed-postgres", values=changed(cidrs | {"s3-port": "9000"}))


def policies(resources: list[Resource], direction: str) -> list[Resource]:
    specs = [r["spec"] for r in resources if r["kind"] == "NetworkPolicy"]
    return [spec for spec in specs if direction in spec["policyTypes"]]


def selected(selector: Resource, labels: dict[str, str]) -> bool:
    """Whether a pod with these labels is meant."""
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def labels_of(resources: list[Resource]) -> dict[str, dict[str, str]]:
    """The pods' labels, with KubeRay's own."""
    found = {}
    for name, pod in pods(resources).items():
        kuberay = {"ray.io/cluster": "ray"} if name in RAY else {}
        found[name] = pod["metadata"]["labels"] | kuberay
    return found


def test_nothing_is_open_that_is_not_listed(resources: list[Resource]) -> None:
    closed = one(resources, "NetworkPolicy", "nothing-by-default")["spec"]
    assert closed == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for direction, peers in (("Egress", "to"), ("Ingress", "from")):
        for policy in policies(resources, direction):
            for rule in policy.get(direction.lower(), []):
                assert rule.get(peers), f"a rule without {peers} is one for everybody: {policy}"


def test_who_leaves_the_cluster_and_where_to(resources: list[Resource]) -> None:
    found: dict[tuple[str, Any], set[str]] = {}
    labels = labels_of(resources)
    for policy in policies(resources, "Egress"):
        for rule in policy.get("egress", []):
            for peer in rule["to"]:
                if block := peer.get("ipBlock"):
                    for port in rule["ports"]:
                        who = {
                            n for n, each in labels.items() if selected(policy["podSelector"], each)
                        }
                        found.setdefault((block["cidr"], port["port"]), set()).update(who)
    assert found == BEYOND
    internet = one(resources, "NetworkPolicy", "internet")["spec"]["egress"][0]["to"][0]["ipBlock"]
    assert {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"} <= set(internet["except"])


def test_without_its_component_nobody_reaches_the_internet(resources: list[Resource]) -> None:
    plain = render(overlay="base")
    assert not [r for r in plain if r["kind"] == "NetworkPolicy" and ANYWHERE in str(r)]


def test_names_are_asked_of_the_clusters_own_dns_only(resources: list[Resource]) -> None:
    ((rule),) = one(resources, "NetworkPolicy", "names")["spec"]["egress"]
    (peer,) = rule["to"]
    assert peer == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
    assert {port["port"] for port in rule["ports"]} == {53}


def test_into_ray_come_its_own_nodes_and_by_its_proxy_airflow(resources: list[Resource]) -> None:
    itself, airflow = one(resources, "NetworkPolicy", "ray")["spec"]["ingress"]
    of_a_cluster = [{"key": "ray.io/cluster", "operator": "Exists"}]
    assert itself["from"] == [{"podSelector": {"matchExpressions": of_a_cluster}}]
    of_airflow = {"matchLabels": {"app.kubernetes.io/name": "airflow"}}
    assert airflow["from"] == [{"podSelector": of_airflow}]
    assert airflow["ports"] == [{"port": 8443}]


def test_people_come_by_the_gateway_and_over_tls(resources: list[Resource]) -> None:
    gateway = one(resources, "Gateway", "penstock")["spec"]
    listeners = {each["name"]: each for each in gateway["listeners"]}
    routes = [r for r in resources if r["kind"] == "HTTPRoute"]
    backends = set()
    for route in routes:
        (parent,) = route["spec"]["parentRefs"]
        listener = listeners.pop(parent["sectionName"])
        (rule,) = route["spec"]["rules"]
        if listener["protocol"] == "HTTP":
            assert rule["filters"][0]["requestRedirect"] == {"scheme": "https", "statusCode": 301}
            continue
        assert route["spec"]["hostnames"] == [listener["hostname"]]
        assert listener["tls"]["mode"] == "Terminate"
        (backend,) = rule["backendRefs"]
        (port,) = one(resources, "Service", backend["name"])["spec"]["ports"]
        assert port["port"] == backend["port"]
        backends.add(backend["name"])
    assert backends == {"api-server", "mlflow"}
    assert not listeners
    users = one(resources, "NetworkPolicy", "users")["spec"]
    labels = labels_of(resources)
    reached = {name for name, each in labels.items() if selected(users["podSelector"], each)}
    assert reached == backends
    for name in reached:  # the port is named in both
        ports = pods(resources)[name]["spec"]["containers"][0]["ports"]
        assert users["ingress"][0]["ports"] == [{"port": ports[0]["name"]}]
    host = config(resources, "airflow")["AIRFLOW__API__BASE_URL"].removeprefix("https://")
    assert host in str(gateway)
