"""What a model was made from, by whom and where: the lineage record that goes with it."""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from pipelines.core.checked_yaml import read_yaml
from pipelines.core.storage import read_json
from pipelines.run.records import KEPT_FILE, PATCH_FILE, record_path, stage_names

# Long or binary inputs are named by their hash; the first is also kept beside the lineage.
SOURCE_FILE = "source.json"
_HASHED = (PATCH_FILE, SOURCE_FILE, "dvc.lock", "requirements.lock")


def lineage(workspace: Path) -> dict[str, Any]:
    """Run, recipe, environment, hardware, hashes of inputs, and the record of each stage done.

    What a workspace lacks (one outside git has no commit, say) is null.
    """
    recipe = workspace / "params.yaml"
    return {
        "run": _json(workspace / "run.json"),
        "recipe": read_yaml(recipe) if recipe.is_file() else None,
        "environment": _json(workspace / "environment.json"),
        "kept": _json(workspace / KEPT_FILE),
        "image": os.environ.get("PENSTOCK_IMAGE"),
        "hardware": {"machine": platform.machine(), "processors": os.cpu_count()},
        "sha256": {name: sha256(workspace / name) for name in _HASHED},
        "records": {
            stage: read_json(path)
            for stage in stage_names()
            if (path := record_path(workspace, stage)).is_file()
        },
    }


def _json(path: Path) -> Any:
    return read_json(path) if path.is_file() else None


def sha256(path: Path) -> str | None:
    """Hash a file's content; None where there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
