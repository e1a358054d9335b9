"""A workspace: the folder of a run, and the run that it belongs to."""

import hashlib
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipelines.core.checked_json import read_model
from pipelines.core.checked_yaml import read_yaml
from pipelines.core.errors import UserError
from pipelines.core.storage import write_json
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import parse_recipe
from pipelines.run.records import RUN_FILE

_NAME_LENGTH = 100  # the most characters of a run's id in its folder's name


class Run(BaseModel):
    """The run that a workspace belongs to, stored as `run.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dag_run_id: str
    git_commit: str
    dirty: bool  # whether tracked files differed from the commit; see uncommitted.diff
    recipe_fingerprint: str
    product: dict[str, str] | None = None  # Penstock's version and the digest of its code
    mlflow_run_id: str | None = None
    mlflow_address: str | None = None  # the URL of the run's page
    mlflow_artifacts: str | None = None  # the place of its artifacts: a path or a URL

    @classmethod
    def read(cls, workspace: Path) -> "Run":
        """Read a workspace's `run.json`; raise UserError if it is missing or damaged."""
        return read_model(workspace / RUN_FILE, cls)

    def write(self, workspace: Path) -> None:
        """Write `run.json`."""
        write_json(workspace / RUN_FILE, self.model_dump())


def find_workspace(runs: Path, run_id: str | None, *signs: str) -> Path:
    """Return the folder of a run; of the newest one if no id is given.

    It has `run.json` or, of a run that could not begin, a file that `signs` names.

    Raises:
        UserError: There is no such run.
    """
    if run_id is not None:
        workspace = workspace_path(runs, run_id)
        if not any((workspace / name).is_file() for name in (RUN_FILE, *signs)):
            raise UserError(f"there is no run {run_id!r}; each folder in {runs} is one")
        return workspace
    # `run.json` comes last and counts: another file may be younger than the next run.
    names = (*signs, RUN_FILE)
    begun = {each.parent: each.stat().st_mtime for n in names for each in runs.glob(f"*/{n}")}
    if not begun:
        raise UserError(f"there is no run in {runs} yet; `penstock run` starts one")
    return max(begun, key=lambda workspace: begun[workspace])


def workspace_path(runs: Path, run_id: str) -> Path:
    """Return the folder of a run, with a name that works as a folder and in PYTHONPATH."""
    # An id may contain `:`, which PYTHONPATH cannot, and may be `.` or very long.
    name = re.sub(r"[^A-Za-z0-9._-]", "-", run_id.lstrip("."))[:_NAME_LENGTH]
    if name != run_id:
        name += "-" + hashlib.sha256(run_id.encode()).hexdigest()[:6]
    return runs / name


def read_recipe(workspace: Path) -> Recipe:
    """Return the recipe of a workspace."""
    path = workspace / "params.yaml"
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; start a new run")
    return parse_recipe(read_yaml(path), where=str(path))
