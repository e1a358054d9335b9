"""The process that works on a task: a file that exists while the process does.

A killed process leaves its file behind, so the next process notices it and tells the logbook.

The module also asks Airflow for a task's state before anything stops the task's job.

A job is stopped only if a user decided so. Airflow ends a task's process or trigger for other
reasons too: at a shutdown, when its api-server is away, when a new scheduler takes over from a dead
one, and when a late triggerer loses its triggers to another.
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
UNKNOWN = "unknown"  # Airflow cannot tell
_GONE = "removed"
# In these states no task waits for the job; a cleared task gets a new job.
_CLEARED_WHILE_RUNNING = "restarting"
OVER = ("success", "failed", "skipped", "upstream_failed", _GONE, _CLEARED_WHILE_RUNNING)


def state_of(ti: Any) -> str:
    """Return a task instance's state, or '' if none yet; call it in a thread without a loop."""
    from airflow.sdk.exceptions import AirflowRuntimeError
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    map_index = -1 if ti.map_index is None else ti.map_index
    try:
        states = RuntimeTaskInstance.get_task_states(
            dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=map_index
        )
    except (AirflowRuntimeError, AttributeError, EOFError, OSError):
        return UNKNOWN  # the last three: this process ended while it asked the supervisor
    found = states.get(ti.run_id, {})
    return next((str(state or "") for state in found.values()), _GONE)


def map_index_of(context: "Context") -> int:
    """Return the map index of a task, or -1 if it is not mapped."""
    map_index = context["ti"].map_index
    return -1 if map_index is None else map_index


@contextmanager
def task_process(workspace: Path, context: "Context", needs: Path | None = None) -> Iterator[None]:
    """Hold the process file of a task within the block; note an earlier process that died.

    Args:
        workspace: The run's workspace.
        context: The task's context.
        needs: A path that exists as long as the workspace does; by default the workspace itself.

    Raises:
        AirflowFailException: The workspace was removed, which a retry does not fix.
    """
    from airflow.sdk.exceptions import AirflowFailException  # the reconciler imports no Airflow

    if not (needs or workspace).exists():
        raise AirflowFailException(
            f"{workspace}: the run's workspace was removed; trigger it again"
        )
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
    """The triggerer that waits for a job; if it is lost, its successor tells the logbook.

    Args:
        state_path: The file of the task's `JobState`, beside this file.
        submission_id: The job's id.
    """

    def __init__(self, state_path: Path, submission_id: str) -> None:
        self._path = state_path.with_suffix(".triggerer.json")
        self._submission_id = submission_id

    def arrive(self, workspace: Path, stage: str) -> bool:
        """Write the file; return whether a former triggerer waited for the job and was lost."""
        # For the platform, the triggerer is the parent of the process that runs its event loop.
        pid, host = os.getppid(), socket.gethostname()
        mine = {"pid": pid, "host": host, "job": self._submission_id}
        former = _read(self._path)
        took_over = bool(former and former != mine and former["job"] == self._submission_id)
        if former and took_over:
            note(workspace, service_lost("triggerer", former["pid"], pid, stage))
        write_json(self._path, mine)
        return took_over

    def leave(self) -> None:
        """Remove the file, because the job's end was seen."""
        self._path.unlink(missing_ok=True)


def service_lost(part: str, old: int, new: int, stage: str) -> Entry:
    """Return the entry of a replaced part of the platform, with the same key in any process."""
    return Entry(
        kind="service lost",
        key=f"{part}-{old}",
        stage=stage,
        cause=f"the process of {part}, {old}, ended",
        done=f"process {new} took over; the run continued",
    )


def _read(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None
