"""The part of Airflow's REST API that `penstock run` and the reconciler need.

It also makes the Airflow pool in which runs queue for GPUs instead of competing for them.

One slot of the pool is one job that trains or evaluates, whatever its size, from its submission to
its end. By default, there are as many slots as the cluster has room for jobs of two workers.
`PENSTOCK_GPU_JOBS` sets another number; a size that a user sets in Airflow is left unchanged.
"""

import os
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx
from tenacity import RetryCallState, retry, retry_if_exception, stop_after_delay, wait_fixed

from pipelines.core.errors import UnreachableError, UserError, one_line
from pipelines.core.settings import GPU_POOL, Settings
from pipelines.orchestration.jobs_api import TokenFile
from pipelines.recipe.schedule_section import REFRESH

_API = "/api/v2"
_TIMEOUT_S = 30.0
_PAGE = 100  # Airflow's largest page
_POLL_S = 0.5
_DAG_APPEARS_S = 60.0  # after a start, until the dag-processor first reads the files
_NOT_ACCEPTED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)  # expired or another server's
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
        """Whether the run's tasks may still start or continue."""
        return self.state in _LIVE


def _may_pass(error: BaseException) -> bool:
    """Return whether a retry may help: without its database, an api-server answers with 500."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.is_server_error
    return isinstance(error, httpx.TransportError)


def _give_up(state: RetryCallState) -> NoReturn:
    error = state.outcome and state.outcome.exception()
    raise UnreachableError(
        f"Airflow has not answered for {_PATIENCE_S:.0f} s ({one_line(error or TimeoutError())}); "
        "its runs continue: see `penstock status`"
    )


class AirflowApi:
    """A client that logs in, and logs in again when its token has expired.

    Raises:
        UserError: Airflow does not answer because the platform is not up, or has no password.
    """

    def __init__(self, settings: Settings) -> None:
        self._client = httpx.Client(
            base_url=settings.airflow_url, timeout=_TIMEOUT_S, auth=_Login(settings)
        )
        try:
            self._client.get(f"{_API}/version").raise_for_status()
        except FileNotFoundError as error:
            raise UserError(
                f"{error.filename}: there is no password of {settings.airflow_user} for Airflow; "
                "`penstock up` makes it, or write it there for an Airflow of your own"
            ) from None
        except httpx.ConnectError:
            raise UserError(
                f"Airflow does not answer at {settings.airflow_url}: start it with `penstock up`"
            ) from None

    def wait_for_dag(self, dag_id: str) -> None:
        """Wait until the dag-processor has read a DAG's file.

        Raises:
            UserError: The file of that name cannot be imported, or the DAG does not appear.
        """
        deadline = time.monotonic() + _DAG_APPEARS_S
        while self.dag_file(dag_id) is None:
            errors = self.import_errors()
            for file, reason in errors.items():
                if Path(file).stem == dag_id.removesuffix(REFRESH):
                    raise UserError(f"{file} cannot be imported: {reason}")
            if time.monotonic() > deadline:
                others = "".join(f"; {file}: {reason}" for file, reason in errors.items())
                raise UserError(
                    f"Airflow has no DAG {dag_id}; see `penstock logs dag-processor`{others}"
                )
            time.sleep(_POLL_S)

    def dag_file(self, dag_id: str) -> str | None:
        """Return the name of the file of a DAG, without `.py`; None if Airflow has no such DAG."""
        try:
            return Path(self._get(f"{_API}/dags/{dag_id}").json()["fileloc"]).stem
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.NOT_FOUND:
                return None
            raise

    def import_errors(self) -> dict[str, str]:
        """Return the last line of the traceback of each DAG file that cannot be imported."""
        errors = self._get(f"{_API}/importErrors").json()["import_errors"]
        return {
            error["filename"]: error["stack_trace"].strip().splitlines()[-1] for error in errors
        }

    def unpause(self, dag_id: str) -> bool:
        """Unpause a DAG, whose runs otherwise stay queued; return whether it was paused."""
        path = f"{_API}/dags/{dag_id}"
        paused: bool = self._get(path).json()["is_paused"]
        if paused:
            self._client.patch(path, json={"is_paused": False}).raise_for_status()
        return paused

    def trigger(self, dag_id: str, run_id: str, conf: dict[str, Any]) -> None:
        """Queue a run of a DAG."""
        body = {"dag_run_id": run_id, "logical_date": None, "conf": conf}
        self._client.post(f"{_API}/dags/{dag_id}/dagRuns", json=body).raise_for_status()

    def announce(self, asset: str, extra: dict[str, Any]) -> None:
        """Add an event to an asset, if a DAG waits for it."""
        found = self._get(f"{_API}/assets", name_pattern=asset).json()["assets"]
        for each in found:
            if each["name"] == asset:
                body = {"asset_id": each["id"], "extra": extra}
                self._client.post(f"{_API}/assets/events", json=body).raise_for_status()

    def pool_slots(self, name: str) -> int | None:
        """Return the size of a pool; None if there is no such pool."""
        response = self._client.get(f"{_API}/pools/{name}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        return int(response.raise_for_status().json()["slots"])

    def make_pool(self, name: str, slots: int, description: str) -> None:
        """Create a pool in which deferred tasks take slots too."""
        body = {"name": name, "slots": slots, "description": description, "include_deferred": True}
        response = self._client.post(f"{_API}/pools", json=body)
        if response.status_code != httpx.codes.CONFLICT:  # another `up` created it first
            response.raise_for_status()

    def set_pool_slots(self, name: str, slots: int) -> None:
        """Change the size of a pool."""
        body = {
            "name": name,
            "slots": slots,
            "include_deferred": True,
        }  # Airflow needs all three
        self._client.patch(f"{_API}/pools/{name}", json=body).raise_for_status()

    def run_state(self, dag_id: str, run_id: str) -> str:
        """Return the state of a run: `queued`, `running`, `success` or `failed`."""
        return str(self.run(dag_id, run_id)["state"])

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """Return everything that Airflow reports about a run."""
        run: dict[str, Any] = self._get(f"{_API}/dags/{dag_id}/dagRuns/{run_id}").json()
        return run

    def runs(self, *, live: bool = False) -> Iterator[DagRun]:
        """Yield the runs of every DAG, or only the live ones, oldest first."""
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
        """Return the run's task instances by task id."""
        page = self._get(f"{_API}/dags/{dag_id}/dagRuns/{run_id}/taskInstances").json()
        return {task["task_id"]: task for task in page["task_instances"]}

    def result(self, dag_id: str, run_id: str, task_id: str) -> Any:
        """Return the return value of a task that succeeded."""
        path = f"{_API}/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"
        response = self._get(f"{path}/xcomEntries/return_value", deserialize=True)
        return response.json()["value"]

    def task(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> dict[str, Any] | None:
        """Return a task instance, or None if there is none; map_index is -1 if it is not mapped."""
        path = f"{_API}/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"
        response = self._client.get(path if map_index < 0 else f"{path}/{map_index}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        task: dict[str, Any] = response.raise_for_status().json()
        return task

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int) -> str:
        """Return the log of a try of a task, one JSON object a line."""
        path = f"{_API}/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}"
        accept = {"Accept": "application/x-ndjson"}
        return self._client.get(path, headers=accept).raise_for_status().text

    def events(self, names: Sequence[str], after: str) -> list[dict[str, Any]]:
        """Return the events of these names in Airflow's log after an ISO time, oldest first."""
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
        """Read a path; retry while the api-server is busy, because the followed run continues."""
        return self._client.get(path, params=params).raise_for_status()


class _Login(httpx.Auth):
    """A bearer token from a user's password, fetched again when it is not accepted."""

    requires_response_body = True

    def __init__(self, settings: Settings) -> None:
        self._url = f"{settings.airflow_url}/auth/token"
        self._user = settings.airflow_user
        self._password_path = settings.airflow_password_path
        self._token: str | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send the request with the current token; log in if there is none or it is refused."""
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
            response = yield request
            if response.status_code not in _NOT_ACCEPTED:
                return
        password = self._password_path.read_text(encoding="utf-8").strip()
        login = {"username": self._user, "password": password}
        response = yield httpx.Request("POST", self._url, json=login)
        response.raise_for_status()
        self._token = response.json()["access_token"]
        request.headers["Authorization"] = f"Bearer {self._token}"
        yield request


VARIABLE = "PENSTOCK_GPU_JOBS"
_WORKERS_A_JOB = 2  # in the default recipe
_DESCRIPTION = "Tasks that compute on GPUs, including deferred tasks; one slot is one job"


def ensure_pool(settings: Settings) -> None:
    """Create the pool if it is missing; set its size if the environment gives one.

    Raises:
        UserError: The environment variable is not a number of jobs.
    """
    given = os.environ.get(VARIABLE)
    if given is not None and (not given.isdigit() or int(given) < 1):
        raise UserError(f"{VARIABLE}={given!r} is not a number of jobs; it must be 1 or more")
    airflow = AirflowApi(settings)
    slots = airflow.pool_slots(GPU_POOL)
    if slots is None:
        airflow.make_pool(GPU_POOL, int(given or _room(settings)), _DESCRIPTION)
    elif given and slots != int(given):
        airflow.set_pool_slots(GPU_POOL, int(given))


def _room(settings: Settings) -> int:
    """Return how many jobs fit in the cluster, by its GPUs, or by its CPUs if it has no GPU."""
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
