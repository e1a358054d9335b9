"""Airflow's REST API, as far as `penstock run` needs it."""

import time
from typing import Any

import httpx

from pipelines.core.errors import UserError
from pipelines.core.settings import Settings
from pipelines.services.secrets import AIRFLOW_USER

_API = "/api/v2"
_TIMEOUT_S = 30.0
_DAG_APPEARS_S = 60.0  # after a start: the dag-processor's first look


class AirflowApi:
    """A client that has logged in.

    Raises:
        UserError: nobody answers; the platform is not up.
    """

    def __init__(self, settings: Settings) -> None:
        self._client = httpx.Client(base_url=settings.airflow_url, timeout=_TIMEOUT_S)
        try:
            password = settings.airflow_password_path.read_text(encoding="utf-8").strip()
            login = {"username": AIRFLOW_USER, "password": password}
            response = self._client.post("/auth/token", json=login)
        except (FileNotFoundError, httpx.ConnectError):
            raise UserError(
                f"Airflow does not answer at {settings.airflow_url}: start it with `penstock up`"
            ) from None
        response.raise_for_status()
        self._client.headers["Authorization"] = f"Bearer {response.json()['access_token']}"

    def wait_for_dag(self, dag_id: str) -> None:
        """Wait until the dag-processor has read a DAG's file.

        Raises:
            UserError: a DAG file can't be imported, or the DAG doesn't appear.
        """
        deadline = time.monotonic() + _DAG_APPEARS_S
        while self._client.get(f"{_API}/dags/{dag_id}").status_code == httpx.codes.NOT_FOUND:
            if errors := self._get(f"{_API}/importErrors")["import_errors"]:
                reason = errors[0]["stack_trace"].strip().splitlines()[-1]
                raise UserError(f"{errors[0]['filename']} can't be imported: {reason}")
            if time.monotonic() > deadline:
                raise UserError(f"Airflow knows no DAG {dag_id}; see `penstock logs dag-processor`")
            time.sleep(0.5)

    def unpause(self, dag_id: str) -> bool:
        """Let a DAG's runs start; True where it was paused."""
        path = f"{_API}/dags/{dag_id}"
        paused: bool = self._get(path)["is_paused"]
        if paused:
            self._client.patch(path, json={"is_paused": False}).raise_for_status()
        return paused

    def trigger(self, dag_id: str, run_id: str, conf: dict[str, Any]) -> None:
        """Queue a run."""
        body = {"dag_run_id": run_id, "logical_date": None, "conf": conf}
        self._client.post(f"{_API}/dags/{dag_id}/dagRuns", json=body).raise_for_status()

    def run_state(self, dag_id: str, run_id: str) -> str:
        """`queued`, `running`, `success` or `failed`."""
        return str(self._get(f"{_API}/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def tasks(self, dag_id: str, run_id: str) -> dict[str, dict[str, Any]]:
        """The run's task instances by task id."""
        page = self._get(f"{_API}/dags/{dag_id}/dagRuns/{run_id}/taskInstances")
        return {task["task_id"]: task for task in page["task_instances"]}

    def result(self, dag_id: str, run_id: str, task_id: str) -> Any:
        """What a task returned, or None."""
        path = (
            f"{_API}/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"
            "/xcomEntries/return_value"
        )
        response = self._client.get(path, params={"deserialize": True})
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        response.raise_for_status()
        return response.json()["value"]

    def _get(self, path: str) -> Any:
        response = self._client.get(path)
        response.raise_for_status()
        return response.json()
