"""The manifests, rendered, and what is changed in them for an API server of 1.20."""

import os
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from pipelines.core.settings import PROJECT
from tests.infra.kubernetes.control_plane import PROGRAMS, Resource

FOLDER = PROJECT / "infra" / "kubernetes"
NAMESPACE = "penstock"
FULLEST = FOLDER / "gpudirect"  # with the base and Postgres in it


def overlays() -> list[Path]:
    """Each folder that is applied by itself."""
    return [path for path in _kustomizations() if _kind(path) == "Kustomization"]


def components() -> list[Path]:
    """Each folder that an overlay may take on top, less what the fullest one has already."""
    own = yaml.safe_load((FULLEST / "kustomization.yaml").read_text()).get("components", [])
    taken = [(FULLEST / name).resolve() for name in own]
    found = [path for path in _kustomizations() if _kind(path) == "Component"]
    return [path for path in found if path.resolve() not in taken]


def render(overlay: Path) -> list[Resource]:
    """What an overlay holds, as kustomize gives it."""
    done = subprocess.run(
        [PROGRAMS / "kubectl", "kustomize", overlay], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{overlay}: {done.stderr}"
    return list(yaml.safe_load_all(done.stdout))


def render_with(
    folder: Path, *components: Path, values: dict[str, str] | None = None, **changes: Any
) -> list[Resource]:
    """A copy of the fullest overlay, as a site makes its own: more components, its own values."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    own = yaml.safe_load((FULLEST / "kustomization.yaml").read_text())
    for key in ("resources", "components"):
        named = [FULLEST / name for name in own.get(key, [])]
        # The values are put in place last, after what a component brings.
        named = [*components, *named] if key == "components" else named
        for file in (path for path in named if path.is_file()):
            shutil.copy(file, folder)
        own[key] = [
            path.name if path.is_file() else os.path.relpath(path.resolve(), folder)
            for path in dict.fromkeys(path.resolve() for path in named)
        ]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(own | changes))
    settings = yaml.safe_load((folder / "values.yaml").read_text())
    settings["data"] |= values or {}
    (folder / "values.yaml").write_text(yaml.safe_dump(settings))
    return render(folder)


def for_older(resources: list[Resource]) -> list[Resource]:
    """The same resources in words that 1.20 knows."""
    older = deepcopy(resources)
    for each in older:
        match each["apiVersion"], each["kind"]:
            case "policy/v1", "PodDisruptionBudget":
                each["apiVersion"] = "policy/v1beta1"
            case "batch/v1", "CronJob":
                each["apiVersion"] = "batch/v1beta1"
            case _, "Namespace":  # the server sets this label itself since 1.21
                labels = each["metadata"].setdefault("labels", {})
                labels["kubernetes.io/metadata.name"] = each["metadata"]["name"]
    return older


def definitions() -> list[Resource]:
    """The custom resources' definitions, as the folder `definitions` keeps them."""
    found = []
    for path in sorted((Path(__file__).parent / "definitions").glob("*.yaml")):
        found += yaml.safe_load(path.read_text())
    return [_older_schema(each) for each in found]


def _older_schema(schema: Any) -> Any:
    """Less what 1.20 can't read: rules in CEL, selectable fields, defaults of an empty string.

    Debian's build takes an empty string for none, and Kubernetes' first API has an empty name.
    """
    if isinstance(schema, list):
        return [_older_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    older = {
        key: _older_schema(value)
        for key, value in schema.items()
        if key not in ("x-kubernetes-validations", "selectableFields")
        and not (key == "default" and value == "")
    }
    group = older.get("properties", {}).get("group", {})
    if group.get("maxLength") and not group.get("minLength"):
        group["nullable"] = True
    for key in older.get("x-kubernetes-list-map-keys", []):
        if "default" not in older["items"]["properties"][key]:
            required = older["items"].setdefault("required", [])
            required += [key] if key not in required else []
    return older


def _kustomizations() -> list[Path]:
    return sorted(path.parent for path in FOLDER.rglob("kustomization.yaml"))


def _kind(folder: Path) -> str:
    kind: str = yaml.safe_load((folder / "kustomization.yaml").read_text())["kind"]
    return kind
