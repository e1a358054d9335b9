"""Which workspace belongs to a DAG run, and which to the members of a sweep."""

from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core.settings import load_settings
from pipelines.core.storage import read_json, write_json
from pipelines.run.workspace import Run, workspace_path

if TYPE_CHECKING:
    from airflow.sdk import Context

MAIN_DAG = "llm_pipeline"
_SWEEP_FILE = "sweep.json"  # in a sweep's workspace: the overrides of each member, a line each


def workspace_name(dag_id: str, run_id: str) -> str:
    """What a run's workspace is named after: runs of two DAGs may have the same id."""
    return run_id if dag_id == MAIN_DAG else f"{dag_id}__{run_id}"


def dag_run_workspace(context: "Context") -> Path:
    """The workspace of a task's DAG run, which may not be there yet."""
    dag_run = context["dag_run"]
    return workspace_path(load_settings().runs, workspace_name(dag_run.dag_id, dag_run.run_id))


def member_name(workspace: Path, index: int) -> str:
    """What the workspace of a sweep's member is named after."""
    return f"{Run.read(workspace).dag_run_id}.{index}"


def keep_members(workspace: Path, lines: list[str]) -> None:
    """Note the overrides of each member in the sweep's workspace."""
    write_json(workspace / _SWEEP_FILE, lines)


def members(workspace: Path) -> list[Path]:
    """The workspaces of a sweep's members that have begun; none of another run."""
    path = workspace / _SWEEP_FILE
    count = len(read_json(path)) if path.is_file() else 0
    paths = (member_workspace(workspace, index) for index in range(count))
    return [path for path in paths if path.is_dir()]


def member_workspace(workspace: Path, index: int) -> Path:
    """The workspace of a sweep's member, which may not be there yet."""
    return workspace_path(workspace.parent, member_name(workspace, index))
