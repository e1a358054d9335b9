"""DAG runs from outside, as a user's script has them: Airflow's REST API."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from pipelines.platform.airflow_api import AirflowApi

T = TypeVar("T")
PATIENCE_S = 600


def wait_for(found: Callable[[], T | None], what: str, seconds: float = PATIENCE_S) -> T:
    """The first true result."""
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.5)
    return result


class DagRun:
    """One run of a DAG."""

    def __init__(self, airflow: AirflowApi, dag_id: str, run_id: str) -> None:
        self._airflow = airflow
        self._path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}"
        self.dag_id, self.run_id = dag_id, run_id

    def start(self, conf: dict[str, Any]) -> None:
        """Trigger it."""
        self._airflow.wait_for_dag(self.dag_id)
        self._airflow.unpause(self.dag_id)
        self._airflow.trigger(self.dag_id, self.run_id, conf)

    def state(self) -> str:
        """`queued`, `running`, `success` or `failed`."""
        return self._airflow.run_state(self.dag_id, self.run_id)

    def mark(self, state: str) -> None:
        """Mark the whole run."""
        self._send("PATCH", "", {"state": state})

    def clear(self, *tasks: str) -> None:
        """Clear some tasks, or, without a name, those that failed."""
        body = {"dry_run": False, "dag_run_id": self.run_id, "only_failed": not tasks}
        if tasks:
            body["task_ids"] = list(tasks)
        self._airflow._client.post(
            f"/api/v2/dags/{self.dag_id}/clearTaskInstances", json=body
        ).raise_for_status()

    def answer(self, task: str, option: str) -> None:
        """Answer the question that a task awaits."""
        path = f"/taskInstances/{task}/-1/hitlDetails"
        self._send("PATCH", path, {"chosen_options": [option], "params_input": {}})

    def question(self, task: str) -> dict[str, Any]:
        """What a task asks."""
        return self._send("GET", f"/taskInstances/{task}/-1/hitlDetails", None)

    def tasks(self) -> list[dict[str, Any]]:
        """All task instances, mapped ones too."""
        return self._send("GET", "/taskInstances", None)["task_instances"]

    def wait_for_task(self, task: str, state: str) -> None:
        """Wait until a task is in a state; another final one is an error, told with its log."""
        deadline = time.monotonic() + PATIENCE_S
        while (now := self._task(task)["state"]) != state:
            over = now in ("failed", "upstream_failed", "skipped") or time.monotonic() > deadline
            assert not over, f"{task} is {now}, not {state}\n{self.log(task)[-5000:]}"
            time.sleep(0.5)

    def log(self, task: str) -> str:
        """What every try of a task has logged."""
        tries = range(1, self._task(task)["try_number"] + 1)
        answers = [self._send("GET", f"/taskInstances/{task}/logs/{n}", None) for n in tries]
        return "\n".join(str(line) for answer in answers for line in answer["content"])

    def _task(self, task: str) -> dict[str, Any]:
        return next(each for each in self.tasks() if each["task_id"] == task)

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        answer = self._airflow._client.request(method, f"{self._path}{path}", json=body)
        assert answer.is_success, answer.text
        return answer.json()
