"""Airflow's REST API, as far as `penstock run` and the reconciler need it.

Airflow's pool that makes runs queue for GPUs rather than fight over them.

A slot is one job that trains or evaluates, whatever its size, from its submission to its end. There
are as many as jobs of two workers have room in the cluster at a time; another number is set by
`PENSTOCK_GPU_JOBS`, or by a user in Airflow, whose pool is left as it is.
"""

import os
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx
from tenacity import RetryCallState, retry, retry_if_exception, stop_after_delay, wait_fixed

from pipelines.core.errors import UnreachableError, UserError, one_line
from pipelines.core.settings import GPU_POOL, Settings
from pipelines.orchestration.jobs_api import TokenFile
from pipelines.platform.secrets import AIRFLOW_USER

_API = "/api/v2"
_TIMEOUT_S = 30.0
_PAGE = 100  # Airflow's most
_DAG_APPEARS_S = 60.0  # after a start: the dag-processor's first look
_NOT_ACCEPTED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)  # expired, not ours
_PATIENCE_S = 120.0  # a restart of the api-server takes half a minute
_LIVE = ("queued", "running")


@dataclass(frozen=True)
class DagRun:
    """One run of any DAG."""

    dag_id: str
    run_id: str
    state: str  # queued, running, success or failed

    @property
    def live(self) -> bool:
        """Whether its tasks may still begin, or go on."""
        return self.state in _LIVE


def _may_pass(error: BaseException) -> bool:
    """Whether asking again may help: an api-server whose database is away answers with 500."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.is_server_error
    return isinstance(error, httpx.TransportError)


def _give_up(state: RetryCallState) -> NoReturn:
    error = state.outcome and state.outcome.exception()
    raise UnreachableError(
        f"Airflow has not answered for {_PATIENCE_S:.0f} s ({one_line(error or TimeoutError())}); "
        "its runs go on: see `penstock status`"
    )


class AirflowApi:
    """A client that logs in, and again when its token has expired.

    Raises:
        UserError: nobody answers; the platform is not up.
    """

    def __init__(self, settings: Settings) -> None:
        self._client = httpx.Client(
            base_url=settings.airflow_url, timeout=_TIMEOUT_S, auth=_Login(settings)
        )
        try:
            self._client.get(f"{_API}/version").raise_for_status()
        except (FileNotFoundError, httpx.ConnectError):
            raise UserError(
                f"Airflow does not answer at {settings.airflow_url}: start it with `penstock up`"
            ) from None

    def wait_for_dag(self, dag_id: str) -> None:
        """Wait until the dag-processor has read a DAG's file.

        Raises:
            UserError: a DAG file can't be imported, or the DAG doesn't appear.
        """
        deadline = time.monotonic() + _DAG_APPEARS_S
        while self._client.get(f"{_API}/dags/{dag_id}").status_code == httpx.codes.NOT_FOUND:
            for file, reason in self.import_errors().items():
                raise UserError(f"{file} can't be imported: {reason}")
            if time.monotonic() > deadline:
                raise UserError(f"Airflow knows no DAG {dag_id}; see `penstock logs dag-processor`")
            time.sleep(0.5)

    def import_errors(self) -> dict[str, str]:
        """The last line of the traceback of each DAG file that can't be imported."""
        errors = self._get(f"{_API}/importErrors").json()["import_errors"]
        return {
            error["filename"]: error["stack_trace"].strip().splitlines()[-1] for error in errors
        }

    def unpause(self, dag_id: str) -> bool:
        """Let a DAG's runs start, as those of a paused one stay queued; whether it was paused."""
        path = f"{_API}/dags/{dag_id}"
        paused: bool = self._get(path).json()["is_paused"]
        if paused:
            self._client.patch(path, json={"is_paused": False}).raise_for_status()
        return paused

    def trigger(self, dag_id: str, run_id: str, conf: dict[str, Any]) -> None:
        """Queue a run."""
        body = {"dag_run_id": run_id, "logical_date": None, "conf": conf}
        self._client.post(f"{_API}/dags/{dag_id}/dagRuns", json=body).raise_for_status()

    def pool_slots(self, name: str) -> int | None:
        """The size of a pool; None where there is none."""
        response = self._client.get(f"{_API}/pools/{name}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        return int(response.raise_for_status().json()["slots"])

    def make_pool(self, name: str, slots: int, description: str) -> None:
        """Make a pool in which deferred tasks count."""
        body = {"name": name, "slots": slots, "description": description, "include_deferred": True}
        response = self._client.post(f"{_API}/pools", json=body)
        if response.status_code != httpx.codes.CONFLICT:  # another `up` was quicker
            response.raise_for_status()

    def set_pool_slots(self, name: str, slots: int) -> None:
        """Change the size of a pool."""
        body = {"name": name, "slots": slots, "include_deferred": True}  # Airflow wants all three
        self._client.patch(f"{_API}/pools/{name}", json=body).raise_for_status()

    def run_state(self, dag_id: str, run_id: str) -> str:
        """`queued`, `running`, `success` or `failed`."""
        return str(self.run(dag_id, run_id)["state"])

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """All that Airflow says of a run."""
        run: dict[str, Any] = self._get(f"{_API}/dags/{dag_id}/dagRuns/{run_id}").json()
        return run

    def runs(self, *, live: bool = False) -> Iterator[DagRun]:
        """The runs of every DAG, or the live ones, oldest first."""
        query: dict[str, Any] = {"state": _LIVE} if live else {}
        seen, total = 0, 1
        while seen < total:
            page = self._get(
                f"{_API}/dags/~/dagRuns", order_by="id", limit=_PAGE, offset=seen, **query
            ).json()
            total = page["total_entries"] if page["dag_runs"] else 0
            seen += len(page["dag_runs"])
            for run in page["dag_runs"]:
                yield DagRun(run["dag_id"], run["dag_run_id"], run["state"])

    def tasks(self, dag_id: str, run_id: str) -> dict[str, dict[str, Any]]:
        """The run's task instances by task id."""
        page = self._get(f"{_API}/dags/{dag_id}/dagRuns/{run_id}/taskInstances").json()
        return {task["task_id"]: task for task in page["task_instances"]}

    def result(self, dag_id: str, run_id: str, task_id: str) -> Any:
        """What a task that succeeded returned."""
        path = f"{_API}/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"
        response = self._get(f"{path}/xcomEntries/return_value", deserialize=True)
        return response.json()["value"]

    def task(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> dict[str, Any] | None:
        """A task instance as it is now, None where Airflow knows none; -1 for one not mapped."""
        path = f"{_API}/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"
        response = self._client.get(path if map_index < 0 else f"{path}/{map_index}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        task: dict[str, Any] = response.raise_for_status().json()
        return task

    def events(self, names: Sequence[str], after: str) -> list[dict[str, Any]]:
        """What users did after a time in ISO format, oldest first; by Airflow's own names."""
        params: dict[str, Any] = {"included_events": names, "after": after, "limit": _PAGE}
        params |= {"order_by": "when"}
        response = self._client.get(f"{_API}/eventLogs", params=params).raise_for_status()
        events: list[dict[str, Any]] = response.json()["event_logs"]
        return events

    @retry(
        retry=retry_if_exception(_may_pass),
        stop=stop_after_delay(_PATIENCE_S),
        wait=wait_fixed(1),
        retry_error_callback=_give_up,
    )
    def _get(self, path: str, **params: Any) -> httpx.Response:
        """Read, however busy the api-server is; a run that is followed goes on without us."""
        return self._client.get(path, params=params).raise_for_status()


class _Login(httpx.Auth):
    """A bearer token, fetched with the user's password, and again when it is not accepted."""

    requires_response_body = True

    def __init__(self, settings: Settings) -> None:
        self._url = f"{settings.airflow_url}/auth/token"
        self._password_path = settings.airflow_password_path
        self._token: str | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send the request with the token that is there; log in where it is not accepted."""
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
            response = yield request
            if response.status_code not in _NOT_ACCEPTED:
                return
        password = self._password_path.read_text(encoding="utf-8").strip()
        login = {"username": AIRFLOW_USER, "password": password}
        response = yield httpx.Request("POST", self._url, json=login)
        response.raise_for_status()
        self._token = response.json()["access_token"]
        request.headers["Authorization"] = f"Bearer {self._token}"
        yield request


VARIABLE = "PENSTOCK_GPU_JOBS"
_WORKERS_A_JOB = 2  # of the default recipe
_DESCRIPTION = "Tasks that compute on GPUs, deferred ones too; a slot is one job"


def ensure_pool(settings: Settings) -> None:
    """Make the pool where it is missing; set its size where the environment names one.

    Raises:
        UserError: the environment names no number of jobs.
    """
    given = os.environ.get(VARIABLE)
    if given is not None and (not given.isdigit() or int(given) < 1):
        raise UserError(f"{VARIABLE}={given!r}: not a number of jobs; 1 or more run at a time")
    airflow = AirflowApi(settings)
    slots = airflow.pool_slots(GPU_POOL)
    if slots is None:
        airflow.make_pool(GPU_POOL, int(given or _room(settings)), _DESCRIPTION)
    elif given and slots != int(given):
        airflow.set_pool_slots(GPU_POOL, int(given))


def _room(settings: Settings) -> int:
    """How many jobs the cluster has room for: by its GPUs, or by its CPUs where it has none."""
    answer = httpx.get(
        f"{settings.ray_url}/api/v0/nodes",
        params={"limit": 10_000, "detail": True},
        auth=TokenFile(settings.ray_token_path),
        timeout=30.0,
    )
    nodes = answer.raise_for_status().json()["data"]["result"]["result"]
    alive = [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]
    total = {name: sum(node.get(name, 0) for node in alive) for name in ("GPU", "CPU")}
    return max(1, int(total["GPU"] or total["CPU"]) // _WORKERS_A_JOB)
