"""The names of the workspaces of DAG runs and of a sweep's members."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.settings import load_settings
from pipelines.core.storage import read_json, write_json
from pipelines.run.workspace import Run, read_recipe, workspace_path

if TYPE_CHECKING:
    from airflow.sdk import Context

MAIN_DAG, REFRESH_DAG, SWEEP_DAG = "llm_pipeline", "data_refresh", "llm_sweep"
_SWEEP_FILE = "sweep.json"  # in a sweep's workspace: one line of overrides per member


def is_refresh(dag_id: str) -> bool:
    """Return whether the runs of a DAG publish dataset versions."""
    return dag_id == REFRESH_DAG or dag_id.endswith(".refresh")


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


def _running() -> Path:
    return load_settings().home / "airflow" / "running-recipes"


def note_running(workspace: Path, dag_id: str) -> None:
    """Note that a run of a recipe's DAG has begun: the DAG stays until it is over."""
    recipe = read_recipe(workspace)
    if recipe.name == dag_id:
        values = {"dag": dag_id, "recipe": recipe.to_dict()}
        write_json(_running() / f"{workspace.name}.json", values)


def forget_running(workspace: Path) -> None:
    """Note that a run is over."""
    (_running() / f"{workspace.name}.json").unlink(missing_ok=True)


def running_recipes() -> dict[str, Any]:
    """Return the recipes, as plain values, of the runs that are not over, by their DAG."""
    noted = (read_json(path) for path in sorted(_running().glob("*.json")))
    return {each["dag"]: each["recipe"] for each in noted}


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
