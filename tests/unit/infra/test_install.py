"""The installation on Kubernetes: what it finds missing, in which order it goes, and how it ends.

The manifests are rendered by the real kubectl; what the cluster says comes from a file of the test.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.core.settings import PROJECT
from tests.unit.infra.manifests import FOLDER, OVERLAY
from tests.unit.infra.test_kubernetes_values import DIGEST, OTHERS, changed

INSTALL = FOLDER / "install.py"
PREREQUISITES = yaml.safe_load((FOLDER / "prerequisites.yaml").read_text())
# A kubectl that renders as ever, notes what it is told, and answers from a file.
KUBECTL = """#!/usr/bin/env python3
import json, os, pathlib, sys
folder = pathlib.Path(__file__).parent
if sys.argv[1] == "kustomize":
    os.execv({kubectl!r}, ["kubectl", *sys.argv[1:]])
with (folder / "told").open("a") as file:
    print(*sys.argv[1:], file=file)
cluster = json.loads((folder / "cluster.json").read_text())
if sys.argv[1] == "api-versions":
    print("\\n".join(cluster["apis"]))
elif sys.argv[1] == "get":
    json.dump({{"items": cluster["objects"].get(sys.argv[2], [])}}, sys.stdout)
elif sys.argv[1] == "apply":
    (folder / "applied").write_text(sys.stdin.read())
"""


def named(*names: str) -> list[dict[str, Any]]:
    return [{"metadata": {"name": name}} for name in names]


@pytest.fixture
def cluster() -> dict[str, Any]:
    """One that has all that the overlay asks for."""
    apis = "v1 apps/v1 batch/v1 policy/v1 networking.k8s.io/v1 gateway.networking.k8s.io/v1"
    apis += " cert-manager.io/v1 external-secrets.io/v1 ray.io/v1 postgresql.cnpg.io/v1"
    gate = {"args": ["--feature-gates=RayClusterMTLS=true"]}
    devices = {"cpu": "4", "nvidia.com/gpu": "8", "rdma/hca": "8"}
    return {
        "apis": apis.split(),
        "objects": {
            "storageclass": named("cephfs", "topolvm"),
            "gatewayclass": named("cilium"),
            "clusterissuer": named("site"),
            "clustersecretstore": named("penstock"),
            "namespace": named("kube-system", "gateways", "cnpg-system"),
            "persistentvolumeclaim": named("parallel"),
            "deployments": [named("kuberay-operator")[0] | {"spec": gate}],
            "nodes": [{"status": {"allocatable": devices}}],
        },
    }


def site_overlay(folder: Path) -> Path:
    """A site's overlay: a copy of the example with its own values, registry and digests."""
    for each in ("kubernetes", "config", "monitoring"):
        shutil.copytree(PROJECT / "infra" / each, folder / "infra" / each)
    place = folder / "infra" / "kubernetes" / "site"
    shutil.copytree(OVERLAY, place)
    (place / "values.yaml").write_text(changed(OTHERS))
    file = place / "kustomization.yaml"
    text = file.read_text().replace("registry.example.com", "registry.site.example")
    file.write_text(re.sub("sha256:0{64}", DIGEST, text))
    return place


@pytest.fixture
def site(tmp_path: Path) -> Path:
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl is installed, which renders the manifests")
    return site_overlay(tmp_path)


def install(command: str, site: Path, cluster: dict[str, Any]) -> tuple[int, str, list[str]]:
    """The exit code, what it said, and what kubectl was told."""
    folder = site.parents[2] / "bin"
    folder.mkdir()
    text = KUBECTL.format(kubectl=shutil.which("kubectl"))
    (folder / "kubectl").write_text(text)
    (folder / "kubectl").chmod(0o755)
    (folder / "cluster.json").write_text(json.dumps(cluster))
    (folder / "told").touch()
    ended = subprocess.run(
        [sys.executable, INSTALL, command, site],
        env=os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    return ended.returncode, ended.stdout + ended.stderr, (folder / "told").read_text().splitlines()


def test_nothing_is_missing_and_nothing_changed_where_all_is_there(
    site: Path, cluster: dict[str, Any]
) -> None:
    code, said, told = install("check", site, cluster)
    assert (code, said) == (0, "nothing is missing\n")
    assert {line.split()[0] for line in told} == {"api-versions", "get"}


def test_what_is_missing_has_its_name(site: Path, cluster: dict[str, Any]) -> None:
    objects = cluster["objects"]
    objects["storageclass"] = named("topolvm")
    objects["clustersecretstore"] = []
    objects["namespace"] = named("kube-system", "cnpg-system")
    objects["persistentvolumeclaim"] = []
    objects["deployments"] = named("kuberay-operator")
    code, said, told = install("apply", site, cluster)
    assert code == 1
    assert said.splitlines() == [
        "missing: storageclass cephfs: not in the cluster",
        "missing: clustersecretstore penstock: not in the cluster",
        "missing: namespace gateways: not in the cluster",
        "missing: persistentvolumeclaim parallel in penstock: not in the cluster",
        "missing: KubeRay's operator: its feature gate RayClusterMTLS is off",
    ]
    assert not [line for line in told if line.startswith(("apply", "--namespace"))]


def test_an_operator_that_is_missing_comes_with_the_command_that_installs_it(
    site: Path, cluster: dict[str, Any]
) -> None:
    cluster["apis"].remove("ray.io/v1")
    code, said, _ = install("check", site, cluster)
    assert code == 1
    (line,) = said.splitlines()
    assert line.startswith(
        "missing: API ray.io/v1: KubeRay: helm upgrade --install kuberay-operator"
    )
    assert "RayClusterMTLS" in line


def test_the_example_as_it_is_names_all_that_is_to_be_filled_in(
    site: Path, cluster: dict[str, Any]
) -> None:
    shutil.rmtree(site)
    shutil.copytree(OVERLAY, site)
    code, said, _ = install("check", site, cluster)
    assert code == 1
    for what in ("airflow.example.com", "registry.example.com", "192.0.2.0/24", "sha256:000000"):
        assert what in said


def test_old_jobs_go_before_new_ones_and_all_parts_are_waited_for(
    site: Path, cluster: dict[str, Any]
) -> None:
    code, said, told = install("apply", site, cluster)
    assert (code, said) == (0, "")
    done = [line for line in told if not line.startswith(("get", "api-versions"))]
    steps = [
        line.removeprefix("--namespace penstock ").removesuffix(" --timeout=15m") for line in done
    ]
    assert steps[:5] == [
        "delete job airflow-prepare --ignore-not-found --wait",
        "delete job mlflow-prepare --ignore-not-found --wait",
        "apply --filename=-",
        "wait --for=condition=complete job/airflow-prepare",
        "wait --for=condition=complete job/mlflow-prepare",
    ]
    assert steps[-1] == "wait --for=condition=HeadPodReady raycluster/ray"
    applied = (site.parents[2] / "bin" / "applied").read_text()
    deployments = [r for r in yaml.safe_load_all(applied) if r["kind"] == "Deployment"]
    waited = {f"rollout status deployment/{r['metadata']['name']}" for r in deployments}
    assert set(steps[5:-1]) == waited


def test_prerequisites_are_those_of_the_overlay_with_their_versions(
    site: Path, cluster: dict[str, Any]
) -> None:
    code, said, _ = install("prerequisites", site, cluster)
    assert code == 0
    commands = said.splitlines()
    serving = {"gateway.networking.k8s.io", "cert-manager.io", "external-secrets.io", "ray.io"}
    serving |= {"postgresql.cnpg.io"}
    assert len(commands) == len(serving)
    needed = [each for each in PREREQUISITES if serving.intersection(each["serves"])]
    for each, command in zip(needed, commands, strict=True):
        assert f" {each['release']} " in command
        assert f" --version {each['version']} " in command
