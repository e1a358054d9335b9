"""A site's values: each of them arrives, and the components that read them."""

import re

import pytest
import yaml

from pipelines.planning.hardware_table import named
from tests.unit.infra.custom_resources import problems
from tests.unit.infra.manifests import OVERLAY, config, one, pods, render

VALUES = yaml.safe_load((OVERLAY / "values.yaml").read_text())
DATA: dict[str, str] = VALUES["data"]
DIGEST = "sha256:" + "a" * 64
# Another value for each, of a form that its place takes.
OTHERS = {
    "airflow-host": "flow.site.example",
    "mlflow-host": "models.site.example",
    "gateway-class": "cilium",
    "gateway-namespace": "gateways",
    "cluster-issuer": "site",
    "kubernetes-api-cidr": "10.2.0.0/28",
    "bucket": "site-models",
    "s3-region": "site-1",
    "s3-endpoint": "https://rgw.site.example:9000",
    "s3-cidr": "10.1.0.0/24",
    "s3-port": "9000",
    "code-source": "s3://site-models/code/models.bundle",
    "code-ref": "v7",
    "oidc-issuer": "https://id.site.example/realms/ml",
    "oidc-client": "ml-platform",
    "oidc-admins": "ml-admins",
    "oidc-users": "ml-users",
    "oidc-cidr": "10.4.0.0/28",
    "ray-host": "ray.site.example",
    "database": "penstock@db.site.example:6432",
    "database-cidr": "10.3.0.0/28",
    "postgres-image": f"registry.site.example/postgresql:17.6@{DIGEST}",
    "postgres-instances": "5",
    "postgres-storage": "313Gi",
    "postgres-memory": "7Gi",
    "shared-storage-class": "cephfs",
    "shared-storage": "37Ti",
    "nvme-storage-class": "topolvm",
    "nvme-storage": "17Ti",
    "airflow-tasks": "333",
    "gpu-jobs": "13",
    "scheduler-cpus": "7",
    "scheduler-memory": "47Gi",
    "run-group": "cpu",
    "run-priority": "high",
    "head-cpus": "11",
    "head-memory": "43Gi",
    "cpu-nodes": "131",
    "cpu-node-cpus": "61",
    "cpu-node-memory": "211Gi",
    "gpu-nodes": "127",
    "gpu-node-gpus": "19",
    "gpu-model": "h200",
    "gpu-node-adapters": "29",
    "gpu-networks": "rail-0,rail-1",
    "gpu-topology": "site.example/rack",
    "gpu-node-cpus": "191",
    "gpu-node-memory": "1999Gi",
}


def changed(values: dict[str, str]) -> str:
    """A file of values with some of them others."""
    assert values.keys() <= DATA.keys()
    return yaml.safe_dump(VALUES | {"data": DATA | values})


def test_each_value_arrives_and_nothing_of_the_example_stays() -> None:
    assert OTHERS.keys() == DATA.keys()
    components = ("managed-postgres", "on-prem-s3", "code", "oidc", "run-clusters")
    resources = render(*components, values=changed(OTHERS))
    assert [problem for each in resources for problem in problems(each)] == []
    text = yaml.safe_dump_all(resources)
    for key, value in OTHERS.items():
        assert re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.])", text), key
    for old in ("example.com", "192.0.2.0", "s3://penstock", "us-east-1"):
        left = [line for line in text.splitlines() if old in line]
        assert [line for line in left if "registry.example.com" not in line] == []
    assert "ConfigMap values" not in [f"{r['kind']} {r['metadata']['name']}" for r in resources]


def test_runs_are_planned_by_a_gpu_that_the_planner_knows() -> None:
    assert named(config(render(), "airflow")["PENSTOCK_GPU"]).memory_bytes


def test_sizes_are_of_the_pool_that_they_name() -> None:
    resources = render(values=changed(OTHERS))
    ray = one(resources, "RayCluster", "ray")["spec"]
    assert {g["groupName"]: g["maxReplicas"] for g in ray["workerGroupSpecs"]} == {
        "cpu": 131,
        "gpu": 127,
    }
    wanted = {"cpu": "191", "memory": "1999Gi", "nvidia.com/gpu": 19, "rdma/hca": 29}
    gpu = pods(resources)["ray-gpu"]["spec"]["containers"][0]["resources"]
    assert gpu == {"requests": wanted, "limits": wanted}
    scheduler = pods(resources)["scheduler"]["spec"]["containers"][0]["resources"]
    assert scheduler == {"requests": {"cpu": "7", "memory": "47Gi"}, "limits": {"memory": "47Gi"}}
    cpu = pods(resources)["ray-cpu"]["spec"]["containers"][0]["resources"]
    assert cpu == {"requests": {"cpu": "61", "memory": "211Gi"}, "limits": {"memory": "211Gi"}}


@pytest.mark.parametrize("name", ["clients", "mlflow"])
def test_a_store_of_ones_own_has_its_address_and_its_authority(name: str) -> None:
    resources = render("on-prem-s3", values=changed({"s3-endpoint": "https://rgw.site.example"}))
    settings = config(resources, name)
    assert settings["AWS_ENDPOINT_URL"] == "https://rgw.site.example"
    assert settings["AWS_CA_BUNDLE"] == "/secrets/s3-ca.crt"
    assert settings["AWS_SHARED_CREDENTIALS_FILE"] == "/secrets/s3"
    authority = one(resources, "Secret", "s3-ca")["data"]
    for pod in ("scheduler", "mlflow", "mlflow-prepare", "ray-head", "ray-cpu", "ray-gpu"):
        (volume,) = [v for v in pods(resources)[pod]["spec"]["volumes"] if v["name"] == "secrets"]
        assert {"secret": {"name": "s3-ca", "optional": True}} in volume["projected"]["sources"]
    assert authority.keys() == {"s3-ca.crt"}


def test_with_a_clouds_roles_there_is_no_key_and_every_part_has_an_account_for_one() -> None:
    resources = render(overlay="base")
    assert "AWS_SHARED_CREDENTIALS_FILE" not in config(resources, "clients")
    assert "s3-" not in str([r for r in resources if r["kind"] == "ExternalSecret"])
    accounts = {name: pod["spec"]["serviceAccountName"] for name, pod in pods(resources).items()}
    assert accounts == {
        **dict.fromkeys(("mlflow", "mlflow-prepare"), "mlflow"),
        **dict.fromkeys(("ray-cpu", "ray-gpu"), "ray-worker"),
        "ray-head": "ray",
    } | {name: "airflow" for name in accounts if not name.startswith(("ray", "mlflow"))}
    for account in set(accounts.values()):
        assert one(resources, "ServiceAccount", account)["automountServiceAccountToken"] is False
