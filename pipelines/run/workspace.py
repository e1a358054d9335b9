"""A workspace: the folder of a run, and which run it belongs to."""

import hashlib
import re
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from pipelines.core.storage import read_json, write_json
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import parse_recipe
from pipelines.run.records import RUN_FILE

_NAME_LENGTH = 100  # of a workspace's folder


class Run(BaseModel):
    """Which run a workspace belongs to: `run.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dag_run_id: str
    git_commit: str
    dirty: bool  # whether tracked files differed from the commit; see uncommitted.diff
    recipe_fingerprint: str
    mlflow_run_id: str | None = None
    mlflow_address: str | None = None  # the run's page
    mlflow_artifacts: str | None = None  # where its artifacts lie: a path or a URL

    @classmethod
    def read(cls, workspace: Path) -> "Run":
        """Read a workspace's `run.json`."""
        return cls.model_validate(read_json(workspace / RUN_FILE))

    def write(self, workspace: Path) -> None:
        """Write `run.json`."""
        write_json(workspace / RUN_FILE, self.model_dump())


def workspace_path(runs: Path, run_id: str) -> Path:
    """The folder of a run. An id may hold `:`, which PYTHONPATH cannot, or be `.` or very long."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", run_id.lstrip("."))[:_NAME_LENGTH]
    if name != run_id:
        name += "-" + hashlib.sha256(run_id.encode()).hexdigest()[:6]
    return runs / name


def read_recipe(workspace: Path) -> Recipe:
    """The recipe of a workspace."""
    path = workspace / "params.yaml"
    return parse_recipe(yaml.safe_load(path.read_text(encoding="utf-8")), where=str(path))
