"""The manifests as kubectl renders them, and what tests look for in them."""

import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.core.settings import PROJECT
from tests.unit.infra.custom_resources import pod_templates

FOLDER = PROJECT / "infra" / "kubernetes"
OVERLAY = FOLDER / "gpudirect"  # with the base and Postgres in it
Resource = dict[str, Any]


@cache
def render(*components: str, overlay: str = OVERLAY.name, values: str = "") -> list[Resource]:
    """An overlay with components added to its own, and values in place of its own ones."""
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl is installed, which renders the manifests")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "infra"
        shutil.copytree(PROJECT / "infra" / "kubernetes", tree / "kubernetes")
        for beside in ("config", "monitoring"):
            shutil.copytree(PROJECT / "infra" / beside, tree / beside)
        place = tree / "kubernetes" / overlay
        file = place / "kustomization.yaml"
        kustomization = yaml.safe_load(file.read_text())
        if components:
            own = kustomization["components"]  # `values` stays the last of them
            kustomization["components"] = [*(f"../{name}" for name in components), *own]
        if "on-prem-s3" in components:
            (place / "s3-ca.crt").write_text("an authority\n")
            kustomization["secretGenerator"] = [
                {
                    "name": "s3-ca",
                    "namespace": "penstock",
                    "files": ["s3-ca.crt"],
                    "options": {"disableNameSuffixHash": True},
                }
            ]
        file.write_text(yaml.safe_dump(kustomization))
        if values:
            (place / "values.yaml").write_text(values)
        rendered = subprocess.run(
            ["kubectl", "kustomize", place],
            capture_output=True,
            text=True,
            env=os.environ | {"HOME": folder},
        )
    assert (rendered.returncode, rendered.stderr) == (0, "")
    return list(yaml.safe_load_all(rendered.stdout))


def one(resources: list[Resource], kind: str, name: str) -> Resource:
    """The resource of this kind and name."""
    (found,) = [r for r in resources if (r["kind"], r["metadata"]["name"]) == (kind, name)]
    return found


def config(resources: list[Resource], name: str) -> dict[str, str]:
    """A generated ConfigMap, whose name ends in a hash of its content."""
    (found,) = [
        r
        for r in resources
        if r["kind"] == "ConfigMap" and re.fullmatch(rf"{name}(-\w{{10}})?", r["metadata"]["name"])
    ]
    data: dict[str, str] = found["data"]
    return data


def pods(resources: list[Resource]) -> dict[str, Resource]:
    """The templates of all pods, by what they are called."""
    return {name: pod for r in resources for name, pod in pod_templates(r).items()}


def containers(pod: Resource) -> list[Resource]:
    """All containers of a pod, those that run first included."""
    found: list[Resource] = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
    return found
