"""Airflow's own word on a task, asked before something stops the task's job.

A job is stopped only on a person's word. Airflow ends a task's process or trigger for other reasons
too: at a shutdown, where its api-server is away, where a new scheduler takes over from a dead one,
and where a triggerer that was late loses its triggers to another.
"""

from typing import Any

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
