"""React to a DAG run's start, end or mark by a user; the plugin runs `python -m ... EVENT`.

The MLflow run gets its DAG run's state: failed if that failed, and running again if a user cleared
it. A failed run is posted to the webhook.
"""

import sys
import time
from pathlib import Path
from typing import Literal

import httpx
from pydantic import BaseModel, ConfigDict
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from pipelines.core.log import set_up_logging
from pipelines.core.settings import load_settings
from pipelines.orchestration.naming import members, workspace_name
from pipelines.orchestration.webhook import Notice, alerts_of, failure_line, post
from pipelines.run.records import RUN_FILE, EvaluateRecord, record_path
from pipelines.run.workspace import Run, workspace_path
from pipelines.tracking.rest import RUNNING, run_status, set_run_status

_PATIENCE_S = 300  # seconds to wait for an MLflow server that is down


class DagRunEvent(BaseModel):
    """An event that the plugin reports."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dag: str
    run: str
    state: Literal["running", "success", "failed"]
    by_hand: bool  # marked by a user
    task: str | None  # the first task that failed
    map_index: int


def main(argument: str) -> None:
    """React to one event."""
    set_up_logging()
    event = DagRunEvent.model_validate_json(argument)
    workspace = workspace_path(load_settings().runs, workspace_name(event.dag, event.run))
    if event.state == "failed":
        post(_notice(event, workspace))
    if not (workspace / RUN_FILE).is_file():
        return
    _follow(workspace, event.state, is_member=False)
    for member in members(workspace):
        _follow(member, event.state, is_member=True)


def _notice(event: DagRunEvent, workspace: Path) -> Notice:
    airflow = load_settings().airflow_url
    links = {"run": f"{airflow}/dags/{event.dag}/runs/{event.run}"}
    if event.task:
        mapped = f"/mapped/{event.map_index}" if event.map_index >= 0 else ""
        links["log"] = f"{links['run']}/tasks/{event.task}{mapped}"
    if (workspace / RUN_FILE).is_file() and (address := Run.read(workspace).mlflow_address):
        links["mlflow"] = address
    error = "marked as failed by a user" if event.by_hand else failure_line(workspace, event.task)
    return Notice(
        event="failed",
        dag=event.dag,
        run=event.run,
        task=event.task,
        error=error,
        links=links,
        alerts=alerts_of(event.dag),
    )


def _follow(workspace: Path, state: str, *, is_member: bool) -> None:
    if (run_id := Run.read(workspace).mlflow_run_id) is None:
        return
    unfinished = is_member and not record_path(workspace, EvaluateRecord.stage).is_file()
    if state == "running":
        _set_status(run_id, RUNNING)
    elif state == "failed" or unfinished:
        _set_status(run_id, "FAILED")
    else:
        _set_status(run_id, "FINISHED")


@retry(
    retry=retry_if_exception_type(httpx.TransportError),
    stop=stop_after_delay(_PATIENCE_S),
    wait=wait_fixed(5),
    reraise=True,
)
def _set_status(run_id: str, status: str) -> None:
    """Open or close an MLflow run; a run that is already closed keeps its end time and status."""
    if (run_status(run_id) == RUNNING) != (status == RUNNING):
        set_run_status(run_id, status, None if status == RUNNING else int(time.time() * 1000))


if __name__ == "__main__":
    main(*sys.argv[1:])
