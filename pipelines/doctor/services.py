"""Airflow, Ray and MLflow, where the settings say that they are."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
    """Check the heartbeats of Airflow's parts, and whether its DAG files can be read."""
    settings = load_settings()
    url = settings.airflow_url
    place = Place("Airflow", url, "PENSTOCK_AIRFLOW_URL")
    health = place.answer(lambda: _get(f"{url}/api/v2/monitor/health"))
    faults = list(assess_airflow(health))
    yield from faults or assess_dag_files(url, place.answer(lambda: _import_errors(settings)))


def assess_airflow(health: Mapping[str, Any]) -> Iterator[Seen]:
    """Yield a part that has no heartbeat was never started, or is dead."""
    for part in _AIRFLOW:
        status = (health.get(part) or {}).get("status")
        if status != "healthy":
            beat = (health.get(part) or {}).get(f"latest_{part}_heartbeat")
            last = f", last heard of at {beat}" if beat else ""
            name = part.replace("_", "-")
            fix = f"see `penstock logs {name}`; `penstock up` starts what is down"
            yield problem(f"Airflow's {name} is {status or 'not running'}{last}", fix)


def assess_dag_files(url: str, errors: Mapping[str, str]) -> Iterator[Seen]:
    """Tell of each DAG file that can't be imported why not."""
    for file, reason in errors.items():
        yield problem(f"{file} can't be imported: {reason}", "fix it; Airflow reads it again")
    if not errors:
        yield ok(f"{url}: all parts are healthy, every DAG file is read")


def ray() -> Iterator[Seen]:
    """Compare the version of the running Ray with the one installed here."""
    settings = load_settings()
    place = Place("Ray", settings.ray_url, "RAY_API_SERVER_ADDRESS")
    there = place.answer(lambda: str(_get_ray(settings, "/api/version")["ray_version"]))
    yield assess_ray(settings.ray_url, there, installed("ray"))


def ray_nodes() -> int:
    """Return how many nodes of the settings' Ray cluster are alive; 0 where none answers."""
    settings = load_settings()
    place = Place("Ray", settings.ray_url, "RAY_API_SERVER_ADDRESS")
    try:
        return place.answer(lambda: _alive(_get_ray(settings, "/api/v0/nodes?limit=10000")))
    except (NotHereError, FaultError):  # which the check of Ray tells
        return 0


def _alive(answer: dict[str, Any]) -> int:
    return sum(node["state"] == "ALIVE" for node in answer["data"]["result"]["result"])


def assess_ray(url: str, there: str, here: str | None) -> Seen:
    """Return jobs are pickled by one and read by the other."""
    if here is not None and here != there:
        return problem(f"Ray is {there} at {url}, {here} here", f"install ray=={there} here")
    return ok(f"Ray {there} at {url}")


def mlflow() -> Iterator[Seen]:
    """Yield whether the tracking server answers this user."""
    settings = load_settings()
    if not settings.mlflow_url.startswith("http"):
        raise NotHereError(f"{settings.mlflow_url} is no server")
    url = settings.mlflow_url.rstrip("/")
    there = Place("MLflow", url, "MLFLOW_TRACKING_URI").answer(_mlflow_version)
    yield from assess_mlflow(url, there, installed("mlflow"))
    yield ok(f"MLflow at {url} answers a search of experiments")


def assess_mlflow(url: str, there: str, here: str | None) -> Iterator[Seen]:
    """Yield a client of another minor version may not know what the server speaks."""
    if here is not None and here.split(".")[:2] != there.split(".")[:2]:
        fix = f"install mlflow=={there} here, or update the server and migrate its database"
        yield warning(f"MLflow is {there} at {url}, {here} here", fix)


def _mlflow_version() -> str:
    """After a search, as the version is told to anybody."""
    from pipelines.tracking.mlflow_client import call, server_version

    call("GET", "experiments/search", {"max_results": 1}, again=lambda _: False)
    version = server_version()
    if re.match(r"\d+\.\d+", version) is None:
        raise ValueError(version)
    return version


def _import_errors(settings: Settings) -> dict[str, str]:
    from pipelines.platform.airflow_api import AirflowApi

    return AirflowApi(settings).import_errors()


def _get_ray(settings: Settings, path: str) -> dict[str, Any]:
    from pipelines.orchestration.jobs_api import TokenFile

    return _get(f"{settings.ray_url}{path}", TokenFile(settings.ray_token_path))


def _get(url: str, auth: "httpx.Auth | None" = None) -> dict[str, Any]:
    import httpx

    answer = httpx.get(url, auth=auth, timeout=_TIMEOUT_S).raise_for_status().json()
    if not isinstance(answer, dict):
        raise TypeError("not an object")
    return answer


@dataclass(frozen=True)
class Place:
    """Where a service should be, and the variable that says so."""

    name: str
    url: str
    variable: str

    def answer(self, ask: Callable[[], T]) -> T:
        """Return what it says.

        Raises:
            NotHereError: nobody started it.
            FaultError: it is away, refuses, or is another program.
        """
        import httpx

        name, url, variable = self.name, self.url, self.variable
        try:
            return ask()
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            fix = f"see {name}'s log; 401 and 403 are a token or password of another server"
            raise FaultError(f"{name} answers {status} at {url}", fix) from None
        except httpx.TransportError as error:
            if variable not in os.environ and not (load_settings().home / PORTS_FILE).exists():
                raise NotHereError(f"{name} is not up here: `penstock up` starts it") from None
            fix = f"`penstock status` shows what runs here; elsewhere see {variable}, the firewall"
            raise FaultError(f"{name} does not answer at {url}: {error}", fix) from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
            fix = f"see what listens there; {variable} says where {name} is"
            raise FaultError(f"what answers at {url} is not {name}", fix) from None
