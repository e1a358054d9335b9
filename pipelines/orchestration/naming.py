"""The names of DAGs, of the workspaces of their runs and of a sweep's members."""

from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core.settings import load_settings
from pipelines.core.storage import read_json, write_json
from pipelines.recipe.schedule_section import MAIN_DAG
from pipelines.run.workspace import Run, workspace_path

if TYPE_CHECKING:
    from airflow.sdk import Context

_SWEEP_FILE = "sweep.json"  # in a sweep's workspace: one line of overrides per member


def champion_asset(model: str) -> str:
    """Return the name of the asset that gets an event at each promotion and rollback."""
    return f"model/{model}@champion"


def workspace_name(dag_id: str, run_id: str) -> str:
    """Return the name of a run's workspace; two DAGs may have runs with the same id."""
    return run_id if dag_id == MAIN_DAG else f"{dag_id}__{run_id}"


def dag_run_workspace(context: "Context") -> Path:
    """Return the workspace of a task's DAG run, which may not exist yet."""
    dag_run = context["dag_run"]
    return workspace_path(load_settings().runs, workspace_name(dag_run.dag_id, dag_run.run_id))


def _live() -> Path:
    return load_settings().home / "airflow" / "live-recipes.json"


def note_live(files: dict[str, str]) -> None:
    """Note the DAGs of recipes with runs that are queued or running; they stay until these end.

    Args:
        files: The DAG file of each DAG, by its name without `.py`.
    """
    if files != live_recipes():
        write_json(_live(), files)


def live_recipes() -> dict[str, str]:
    """Return the DAG file of each DAG of a recipe whose runs are not over."""
    noted: dict[str, str] = read_json(_live()) if _live().is_file() else {}
    return noted


def member_name(workspace: Path, index: int) -> str:
    """Return the name of the workspace of a sweep's member."""
    return f"{Run.read(workspace).dag_run_id}.{index}"


def keep_members(workspace: Path, lines: list[str]) -> None:
    """Note the overrides of each member in the sweep's workspace."""
    write_json(workspace / _SWEEP_FILE, lines)


def members(workspace: Path) -> list[Path]:
    """Return the workspaces of a sweep's members that have begun; other runs have no members."""
    path = workspace / _SWEEP_FILE
    count = len(read_json(path)) if path.is_file() else 0
    paths = (member_workspace(workspace, index) for index in range(count))
    return [path for path in paths if path.is_dir()]


def member_workspace(workspace: Path, index: int) -> Path:
    """Return the workspace of a sweep's member, which may not exist yet."""
    return workspace_path(workspace.parent, member_name(workspace, index))
