"""Airflow, Ray and MLflow, where the settings say that they are."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pipelines.core.settings import PORTS_FILE, Settings, load_settings
from pipelines.doctor.findings import FaultError, NotHereError, Seen, ok, problem, warning
from pipelines.doctor.tools import installed

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 5.0
T = TypeVar("T")

_AIRFLOW = ("metadatabase", "scheduler", "triggerer", "dag_processor")


def airflow() -> Iterator[Seen]:
    """Its parts' heartbeats, and whether its DAG files can be read."""
    settings = load_settings()
    url = f"{settings.airflow_url}/api/v2/monitor/health"
    health = _answer(url, settings, "PENSTOCK_AIRFLOW_URL", "Airflow", partial(_get, url))
    faults = list(judge_airflow(health))
    yield from faults or _dag_files(settings)


def judge_airflow(health: Mapping[str, Any]) -> Iterator[Seen]:
    """A part that has no heartbeat was never started, or is dead."""
    for part in _AIRFLOW:
        status = (health.get(part) or {}).get("status")
        if status != "healthy":
            beat = (health.get(part) or {}).get(f"latest_{part}_heartbeat")
            last = f", last heard of at {beat}" if beat else ""
            name = part.replace("_", "-")
            mend = f"see `penstock logs {name}`; `penstock up` starts what is down"
            yield problem(f"Airflow's {name} is {status or 'not running'}{last}", mend)


def _dag_files(settings: Settings) -> Iterator[Seen]:
    from pipelines.services.airflow_api import AirflowApi

    errors = AirflowApi(settings).import_errors()
    for file, reason in errors.items():
        yield problem(f"{file} can't be imported: {reason}", "mend it; Airflow reads it again")
    if not errors:
        yield ok(f"{settings.airflow_url}: all parts are healthy, every DAG file is read")


def ray() -> Iterator[Seen]:
    """Its version against the one installed here."""
    settings = load_settings()
    url = f"{settings.ray_url}/api/version"
    ask = partial(_get_ray, settings, "/api/version")
    there = _answer(url, settings, "RAY_API_SERVER_ADDRESS", "Ray", ask)["ray_version"]
    yield judge_ray(settings.ray_url, there, installed("ray"))


def ray_nodes() -> int:
    """How many nodes of the settings' Ray cluster are alive; 0 where none answers."""
    import httpx

    settings = load_settings()
    try:
        found = _get_ray(settings, "/api/v0/nodes?limit=10000")
    except httpx.HTTPError:  # which the check of Ray tells
        return 0
    return sum(node["state"] == "ALIVE" for node in found["data"]["result"]["result"])


def judge_ray(url: str, there: str, here: str | None) -> Seen:
    """Jobs are pickled by one and read by the other."""
    if here is not None and here != there:
        return problem(f"Ray is {there} at {url}, {here} here", f"install ray=={there} here")
    return ok(f"Ray {there} at {url}")


def mlflow() -> Iterator[Seen]:
    """Whether the tracking server answers this user."""
    from pipelines.tracking.transport import server_version

    settings = load_settings()
    if not settings.mlflow_url.startswith("http"):
        raise NotHereError(f"{settings.mlflow_url} is no server")
    url = settings.mlflow_url.rstrip("/")
    there = _answer(url, settings, "MLFLOW_TRACKING_URI", "MLflow", server_version)
    yield from judge_mlflow(url, there, installed("mlflow"))
    yield from _experiments(url)


def judge_mlflow(url: str, there: str, here: str | None) -> Iterator[Seen]:
    """A client of another minor version may not know what the server speaks."""
    if here is not None and here.split(".")[:2] != there.split(".")[:2]:
        mend = f"install mlflow=={there} here, or update the server and migrate its database"
        yield warning(f"MLflow is {there} at {url}, {here} here", mend)


def _experiments(url: str) -> Iterator[Seen]:
    import httpx

    from pipelines.tracking.transport import call

    try:
        call("GET", "experiments/search", {"max_results": 1}, again=lambda _: False)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        mend = "give MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN"
        mend = mend if status in (401, 403) else "see the server's log; its database may be away"
        yield problem(f"MLflow at {url} answers {status} to a search of experiments", mend)
        return
    yield ok(f"MLflow at {url} answers a search of experiments")


def _get_ray(settings: Settings, path: str) -> Any:
    from pipelines.orchestration.jobs_api import TokenFile

    return _get(f"{settings.ray_url}{path}", TokenFile(settings.ray_token_path))


def _get(url: str, auth: "httpx.Auth | None" = None) -> Any:
    import httpx

    return httpx.get(url, auth=auth, timeout=_TIMEOUT_S).raise_for_status().json()


def _answer(url: str, settings: Settings, variable: str, name: str, ask: Callable[[], T]) -> T:
    """An answer; none where nobody was started is no fault, but where somebody should be."""
    import httpx

    try:
        return ask()
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        mend = f"see {name}'s log; 401 and 403 are a token or password that is not this server's"
        raise FaultError(f"{name} answers {status} at {url}", mend) from None
    except httpx.TransportError as error:
        if variable not in os.environ and not (settings.home / PORTS_FILE).exists():
            raise NotHereError(f"{name} is not up here: `penstock up` starts it") from None
        mend = f"`penstock status` shows what runs here; elsewhere see {variable} and the firewall"
        raise FaultError(f"{name} does not answer at {url}: {error}", mend) from None
