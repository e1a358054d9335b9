"""Airflow's own word on a task, asked where something would stop the task's job."""

from typing import Any

from airflow.sdk.exceptions import AirflowRuntimeError


def is_still(state: str, ti: Any) -> bool:
    """Whether a task instance is in a state; where Airflow can't say, it is.

    A job is stopped only on a person's word. Airflow ends a task's process or trigger for other
    reasons too: at a shutdown, where its api-server is away, and where a triggerer that was late
    loses its triggers to another. To be asked from a thread without an event loop.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    map_index = -1 if ti.map_index is None else ti.map_index
    try:
        states = RuntimeTaskInstance.get_task_states(
            dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=map_index
        )
    except (AirflowRuntimeError, AttributeError, EOFError, OSError):
        return True  # the last three: the end came amid a conversation with Airflow's supervisor
    return state in states.get(ti.run_id, {}).values()
