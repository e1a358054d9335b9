"""The manifests, rendered: their schemas, what they let in, and the platform's settings."""

import os
import re
import subprocess
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from pipelines.core.settings import PROJECT, load_settings
from pipelines.platform.airflow_config import mlflow_database
from pipelines.platform.parts import NAMES
from tests.unit.infra.custom_resources import problems
from tests.unit.infra.manifests import FOLDER, Resource, config, containers, one, pods, render

COMPONENTS = ("monitoring", "kueue", "redis", "backup", "snapshots", "run-clusters", "oidc")
QUEUE = "kueue.x-k8s.io/queue-name"
LOCKED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


@pytest.fixture(scope="module")
def resources() -> list[Resource]:
    return render()


@pytest.fixture(scope="module")
def with_components() -> list[Resource]:
    return render(*COMPONENTS)


def test_each_resource_follows_its_schema(resources: list[Resource]) -> None:
    assert [problem for resource in resources for problem in problems(resource)] == []


def test_the_schemas_would_tell(resources: list[Resource]) -> None:
    ray = deepcopy(one(resources, "RayCluster", "ray"))
    ray["spec"]["authOptions"]["mode"] = "disabled"
    ray["spec"]["headGroupSpec"]["template"]["spec"]["container"] = []
    assert len(problems(ray)) == 2
    service = deepcopy(one(resources, "Service", "mlflow"))
    service["spec"]["port"] = 5000
    assert len(problems(service)) == 1


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("kustomization.yaml")), ids=str)
def test_no_file_lies_beside_what_is_rendered(path: Path) -> None:
    text = path.read_text()
    for file in path.parent.glob("*.yaml"):
        assert file == path or file.name in text


def test_what_names_another_resource_finds_it(resources: list[Resource]) -> None:
    there = {(r["kind"], r["metadata"]["name"]) for r in resources}
    made = {
        ("Secret", r["spec"]["target"]["name"]) for r in resources if r["kind"] == "ExternalSecret"
    }
    made |= {("Secret", r["spec"]["secretName"]) for r in resources if r["kind"] == "Certificate"}
    wanted = set()
    for pod in pods(resources).values():
        for volume in pod["spec"]["volumes"]:
            for source in (volume, *volume.get("projected", {}).get("sources", [])):
                if (secret := source.get("secret")) and not secret.get("optional"):
                    wanted.add(("Secret", secret.get("secretName", secret.get("name"))))
                if files := source.get("configMap"):
                    wanted.add(("ConfigMap", files["name"]))
                if claim := source.get("persistentVolumeClaim"):
                    wanted.add(("PersistentVolumeClaim", claim["claimName"]))
        for container in containers(pod):
            for each in container.get("envFrom", []):
                wanted.add(("ConfigMap", each["configMapRef"]["name"]))
        if account := pod["spec"].get("serviceAccountName"):
            wanted.add(("ServiceAccount", account))
    assert wanted - there - made == {
        ("PersistentVolumeClaim", "parallel"),  # the site's own
        ("ConfigMap", "kube-root-ca.crt"),  # in each namespace, by Kubernetes
    }
    by_kuberay = {"ray.io/cluster": "ray"}
    labels = [
        pod["metadata"]["labels"] | (by_kuberay if name.startswith("ray-") else {})
        for name, pod in pods(resources).items()
    ]
    selecting = ("Service", "PodDisruptionBudget")
    for resource in (r for r in resources if r["kind"] in selecting):
        selector = resource["spec"]["selector"]
        selector = selector.get("matchLabels", selector)
        assert any(selector.items() <= each.items() for each in labels), resource["metadata"]


def test_no_mount_lies_in_one_that_is_read_only(resources: list[Resource]) -> None:
    """It could not be made there; a service account's token comes below /run/secrets."""
    for pod in pods(resources).values():
        for container in containers(pod):
            mounted = container.get("volumeMounts", [])
            mounts = {m["mountPath"]: m.get("readOnly", False) for m in mounted}
            places = [*mounts, "/run/secrets/kubernetes.io/serviceaccount", "/etc/ray/tls"]
            for folder in (Path(path) for path, read_only in mounts.items() if read_only):
                assert not any(folder in Path(place).parents for place in places), folder


def test_every_pod_is_nobodys_and_has_only_what_it_needs(with_components: list[Resource]) -> None:
    """What the level `restricted` asks, which the namespace enforces, and more."""
    namespace = one(with_components, "Namespace", "penstock")["metadata"]["labels"]
    assert namespace == {"pod-security.kubernetes.io/enforce": "restricted"}
    for name, pod in pods(with_components).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        # The autoscaler's, whose container KubeRay adds, is mounted there and nowhere else; the
        # scheduler's tasks raise clusters of runs.
        accounts = {v["name"] for v in spec["volumes"] if "serviceAccountToken" in str(v)}
        assert accounts == ({"account"} if name in ("ray-head", "scheduler") else set())
        assert not any("hostPath" in volume for volume in spec["volumes"])
        for container in containers(pod):
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert name == "scheduler" or not accounts & mounted
            assert container["securityContext"] == LOCKED
            assert container["resources"]["limits"]["memory"]
            pinned = re.fullmatch(r"[\w./-]+@sha256:[0-9a-f]{64}", container["image"])
            assert pinned, f"{name}: the overlay names no digest"
            for variable in container.get("env", []):
                assert not re.search("PASSWORD|TOKEN|SECRET", variable["name"])


def test_all_that_lasts_is_probed_and_survives_a_drain(resources: list[Resource]) -> None:
    for resource in resources:
        if resource["kind"] == "Deployment":
            for container in resource["spec"]["template"]["spec"]["containers"]:
                assert "livenessProbe" in container
            assert resource["spec"]["replicas"] == 1 or one(
                resources, "PodDisruptionBudget", resource["metadata"]["name"]
            )
    parts = {r["metadata"]["name"] for r in resources if r["kind"] in ("Deployment", "RayCluster")}
    assert parts == set(NAMES)
    for name in ("ray-head", "scheduler"):  # KubeRay probes its pods itself
        assert one(resources, "PodDisruptionBudget", name)


def test_a_budget_can_be_counted(resources: list[Resource]) -> None:
    """Of pods that no Deployment has, only a number that stays; of all else none may ever go."""
    counted = [r["spec"] for r in resources if r["kind"] == "Deployment"]
    labels = [spec["template"]["metadata"]["labels"] for spec in counted]
    for budget in (r for r in resources if r["kind"] == "PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        of_deployment = any(selector.items() <= each.items() for each in labels)
        assert set(budget["spec"]) - {"selector"} == {
            "maxUnavailable" if of_deployment else "minAvailable"
        }
    (head,) = one(resources, "PodDisruptionBudget", "ray-head")["spec"]["selector"].values()
    # One pod, of which one has to be there.
    assert head == {"app.kubernetes.io/name": "ray-head", "ray.io/cluster": "ray"}


def test_ray_can_not_be_open(resources: list[Resource]) -> None:
    spec = one(resources, "RayCluster", "ray")["spec"]
    assert spec["authOptions"] == {"mode": "token", "secretName": "ray"}
    assert spec["tlsOptions"] == {"enabled": True}
    assert spec["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    keys = {entry["secretKey"] for entry in one(resources, "ExternalSecret", "ray")["spec"]["data"]}
    assert "auth_token" in keys  # what KubeRay looks for
    assert spec["rayVersion"] == version("ray")


@pytest.mark.parametrize("pod", ["ray-head", "ray-cpu", "ray-gpu"])
def test_ray_starts_as_kuberay_says(pod: str, resources: list[Resource], tmp_path: Path) -> None:
    """Its command names variables, which a shell has to read a second time."""
    (tmp_path / "ray").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "ray").chmod(0o755)
    ray = pods(resources)[pod]["spec"]["containers"][0]
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "REDIS_PASSWORD": "secret",
        "KUBERAY_GEN_RAY_START_CMD": "ray start  --block  --redis-password=$REDIS_PASSWORD ",
    }
    started = subprocess.run(ray["args"], env=environment, check=True, capture_output=True)
    assert started.stdout.decode().splitlines() == [
        "start",
        "--block",
        "--redis-password=secret",
    ]


def test_it_is_the_local_platform_by_other_addresses(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_of = {name: config(resources, name) for name in ("clients", "airflow", "mlflow")}
    for variable, value in (settings_of["clients"] | settings_of["airflow"]).items():
        monkeypatch.setenv(variable, value)
    settings = load_settings()
    assert settings_of["mlflow"]["MLFLOW_BACKEND_STORE_URI"] == mlflow_database(settings)
    for name in ("scheduler", "mlflow", "ray-cpu"):
        mounts = pods(resources)[name]["spec"]["containers"][0]["volumeMounts"]
        assert str(settings.secrets) in [mount["mountPath"] for mount in mounts]
    assert settings.secrets == settings.ray_token_path.parent == settings.signing_key.parent
    assert str(settings.secrets) == settings_of["mlflow"]["PENSTOCK_SECRETS"]
    for service, url, port in (
        ("api-server", settings.airflow_url, settings.airflow_port),
        ("mlflow", settings.mlflow_url, settings.mlflow_port),
        ("ray-https", settings.ray_url, 8443),
    ):
        (found,) = one(resources, "Service", service)["spec"]["ports"]
        assert url.endswith(f"//{service}:{port}")
        assert found["port"] == port
    assert "--workers=1" in pods(resources)["mlflow"]["spec"]["containers"][0]["args"]
    head = one(resources, "RayCluster", "ray")["spec"]["headGroupSpec"]["rayStartParams"]
    assert head["dashboard-port"] == str(settings.ray_port)
    cluster = one(resources, "Cluster", "postgres")
    assert cluster["spec"]["bootstrap"]["initdb"]["database"] == "airflow"
    assert f"//penstock@{cluster['metadata']['name']}-rw:5432" in settings.database_url


def test_secrets_come_from_the_store_by_the_names_that_are_made(
    with_components: list[Resource], tmp_path: Path
) -> None:
    subprocess.run([PROJECT / "infra" / "make-secrets.sh", tmp_path / "secrets"], check=True)
    made = {path.name for path in (tmp_path / "secrets").iterdir()}
    asked = {
        entry["remoteRef"]["key"].removeprefix("penstock/")
        for r in with_components
        if r["kind"] == "ExternalSecret"
        for entry in r["spec"]["data"]
    }
    assert asked - {"oidc-secret"} <= made  # which the provider makes
    assert not [r for r in with_components if r["kind"] == "Secret"]


def test_components_follow_their_schemas_and_change_only_what_they_are_for(
    resources: list[Resource], with_components: list[Resource]
) -> None:
    assert [problem for each in with_components for problem in problems(each)] == []
    spec = deepcopy(one(with_components, "RayCluster", "ray")["spec"])
    redis = spec.pop("gcsFaultToleranceOptions")
    plain = one(resources, "RayCluster", "ray")["spec"]
    assert without_hashes(spec) == without_hashes(plain)
    (port,) = one(with_components, "Service", "redis")["spec"]["ports"]
    assert redis["redisAddress"] == f"redis:{port['port']}"
    secret = redis["redisPassword"]["valueFrom"]["secretKeyRef"]
    made = one(with_components, "ExternalSecret", secret["name"])["spec"]["target"]["template"]
    assert secret["key"] in made["data"]


def test_the_ray_cluster_waits_in_a_queue_that_counts_all_that_it_asks_for(
    with_components: list[Resource],
) -> None:
    ray = one(with_components, "RayCluster", "ray")
    queue = one(with_components, "LocalQueue", ray["metadata"]["labels"][QUEUE])
    of_cluster = render(overlay="queues")
    assert [problem for each in of_cluster for problem in problems(each)] == []
    assert not any("namespace" in each["metadata"] for each in of_cluster)
    cluster_queue = one(of_cluster, "ClusterQueue", queue["spec"]["clusterQueue"])["spec"]
    namespaces = cluster_queue["namespaceSelector"]["matchLabels"].values()
    assert [*namespaces] == [queue["metadata"]["namespace"]]
    (group,) = cluster_queue["resourceGroups"]
    (flavor,) = group["flavors"]
    assert one(of_cluster, "ResourceFlavor", flavor["name"])
    assert [each["name"] for each in flavor["resources"]] == group["coveredResources"]
    asked = {
        resource
        for name, pod in pods(with_components).items()
        if name.startswith("ray-")
        for container in pod["spec"]["containers"]
        for resource in container["resources"]["requests"]
    }
    assert asked == set(group["coveredResources"])  # Kueue admits nothing that it can't count
    assert ray["metadata"]["annotations"]["kueue.x-k8s.io/elastic-job"] == "true"


def test_monitoring_is_told_by_all_and_reaches_only_the_metrics(
    with_components: list[Resource],
) -> None:
    assert config(with_components, "clients")["PENSTOCK_METRICS"] == "1"
    airflow = config(with_components, "airflow")
    assert airflow["AIRFLOW__METRICS__OTEL_ON"] == "True"
    assert airflow["PENSTOCK_AIRFLOW_URL"] == "http://api-server:8080"  # merged, not replaced
    into_ray = one(with_components, "NetworkPolicy", "ray-metrics")["spec"]["ingress"]
    assert [rule["ports"] for rule in into_ray] == [[{"port": 8080}]]
    dashboards = config(with_components, "dashboards")
    assert {Path(name).suffix for name in dashboards} == {".json"}


def without_hashes(spec: Resource) -> str:
    return re.sub(r"(clients)-\w{10}", r"\1", yaml.safe_dump(spec))
