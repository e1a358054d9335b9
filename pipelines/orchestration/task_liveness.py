"""Who is at work on a task: a file that is there while they are.

A process that is killed leaves its file behind; so whoever comes next knows, and the logbook too.

Airflow's own word on a task, asked before something stops the task's job.

A job is stopped only on a user's word. Airflow ends a task's process or trigger for other reasons
too: at a shutdown, where its api-server is away, where a new scheduler takes over from a dead one,
and where a triggerer that was late loses its triggers to another.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.storage import read_json, write_json
from pipelines.orchestration.job_state import instance_name
from pipelines.run.logbook import Entry, note
from pipelines.run.records import JOBS

if TYPE_CHECKING:
    from airflow.sdk import Context

DEFERRED = "deferred"
UNKNOWN = "unknown"  # Airflow can't say
_GONE = "removed"
# Nobody waits for the job of a task that is in one of these; a cleared one gets a job of its own.
_CLEARED_WHILE_RUNNING = "restarting"
OVER = ("success", "failed", "skipped", "upstream_failed", _GONE, _CLEARED_WHILE_RUNNING)


def state_of(ti: Any) -> str:
    """The state of a task instance, empty where it has none yet; from a thread without a loop."""
    from airflow.sdk.exceptions import AirflowRuntimeError
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    map_index = -1 if ti.map_index is None else ti.map_index
    try:
        states = RuntimeTaskInstance.get_task_states(
            dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=map_index
        )
    except (AirflowRuntimeError, AttributeError, EOFError, OSError):
        return UNKNOWN  # the last three: the end came amid a conversation with the supervisor
    found = states.get(ti.run_id, {})
    return next((str(state or "") for state in found.values()), _GONE)


def map_index_of(context: "Context") -> int:
    """-1 for a task that is not mapped."""
    map_index = context["ti"].map_index
    return -1 if map_index is None else map_index


@contextmanager
def task_process(workspace: Path, context: "Context", needs: Path | None = None) -> Iterator[None]:
    """The block is what a task does in one process; tells the logbook of one before that died.

    Args:
        workspace: Of the run.
        context: Of the task.
        needs: What is there as long as the workspace is; by itself, that it is there at all.

    Raises:
        AirflowFailException: there is no workspace any more, which a retry doesn't fix.
    """
    from airflow.sdk.exceptions import AirflowFailException  # the reconciler imports no Airflow

    if not (needs or workspace).exists():
        raise AirflowFailException(f"{workspace}: the run's workspace was removed; trigger it anew")
    ti = context["ti"]
    name = instance_name(ti.task_id, map_index_of(context))
    path = workspace / JOBS / f"{name}.process.json"
    if former := _read(path):
        where = f"process {former['pid']} of try {former['try']} on {former['host']}"
        entry = Entry(
            kind="task lost",
            key=f"task {name}: {where}",
            stage=ti.task_id,
            cause=f"Airflow's {where} died",
            done=f"try {ti.try_number} took over",
        )
        note(workspace, entry)
    write_json(path, {"pid": os.getpid(), "host": socket.gethostname(), "try": ti.try_number})
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


class TriggererProcess:
    """The triggerer that waits for a job; the one that comes after it tells the logbook.

    Args:
        state_path: the task's `JobState`, beside which the file lies.
        submission_id: the job.
    """

    def __init__(self, state_path: Path, submission_id: str) -> None:
        self._path = state_path.with_suffix(".triggerer.json")
        self._submission_id = submission_id

    def arrive(self, workspace: Path, stage: str) -> bool:
        """Begin; whether another triggerer waited for this job before and did not see its end."""
        # The platform knows the triggerer by the process that runs its event loop as a child.
        pid, host = os.getppid(), socket.gethostname()
        mine = {"pid": pid, "host": host, "job": self._submission_id}
        former = _read(self._path)
        took_over = bool(former and former != mine and former["job"] == self._submission_id)
        if former and took_over:
            note(workspace, service_lost("triggerer", former["pid"], pid, stage))
        write_json(self._path, mine)
        return took_over

    def leave(self) -> None:
        """The job's end was seen."""
        self._path.unlink(missing_ok=True)


def service_lost(part: str, old: int, new: int, stage: str) -> Entry:
    """That a part of the platform was replaced; whoever sees it gives it the same key."""
    return Entry(
        kind="service lost",
        key=f"{part}-{old}",
        stage=stage,
        cause=f"the process of {part}, {old}, ended",
        done=f"process {new} took over; the run went on",
    )


def _read(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None
