"""An Airflow plugin that reports what happens to a whole DAG run to `after_dag_run`.

It also reports what a user does to a run, for which Airflow does not call a DAG's own callbacks.
The scheduler and the api-server call these hooks within a transaction, so each only starts a
process. Every process of Airflow loads this file, so it imports few modules.
"""

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from airflow.listeners import hookimpl
from airflow.plugins_manager import AirflowPlugin
from sqlalchemy.orm import object_session

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun

OURS = "penstock"  # the tag of the DAGs whose runs have a workspace


@hookimpl
def on_dag_run_running(dag_run: "DagRun", msg: str) -> None:
    """Report that a run which a user cleared starts again."""
    if dag_run.clear_number:
        _tell(dag_run, "running", msg)


@hookimpl
def on_dag_run_success(dag_run: "DagRun", msg: str) -> None:
    """Report that a run succeeded or was marked as successful."""
    _tell(dag_run, "success", msg)


@hookimpl
def on_dag_run_failed(dag_run: "DagRun", msg: str) -> None:
    """Report that a run failed or was marked as failed."""
    _tell(dag_run, "failed", msg)


def _tell(dag_run: "DagRun", state: str, msg: str) -> None:
    if dag_run.dag is None or OURS not in dag_run.dag.tags:
        return
    # Use the transaction's own session: another would not see what a user has just marked.
    session = object_session(dag_run)
    tasks = dag_run.get_task_instances(session=session) if session else []
    failed = [task for task in tasks if task.state == "failed"]
    failed.sort(key=lambda ti: (ti.end_date is None, ti.end_date))
    event = {
        "dag": dag_run.dag_id,
        "run": dag_run.run_id,
        "state": state,
        "by_hand": "manually" in msg,
        "task": failed[0].task_id if failed else None,
        "map_index": failed[0].map_index if failed else -1,
    }
    command = [sys.executable, "-m", "pipelines.orchestration.after_dag_run", json.dumps(event)]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


class FollowDagRuns(AirflowPlugin):
    """The plugin that registers the hooks of this module."""

    name = "penstock_follow_dag_runs"
    listeners = [sys.modules[__name__]]  # noqa: RUF012 (Airflow's type)
