"""MLflow's REST API, for a process that can't wait seconds for the import of MLflow's own client.

Who speaks to the server is read from MLflow's own variables, as its client does. httpx, too, is
imported with the first request only: of a job's many processes few make one.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipelines.core.settings import load_settings
from pipelines.tracking.client import RETRIES
from pipelines.tracking.points import Point

if TYPE_CHECKING:
    import ssl

_API = "/api/2.0/mlflow"
_TIMEOUT_S = 10.0
_RETRIES = 3
_PASSING = (429, 500, 502, 503, 504)  # answers that a later try may not get
_POINTS_A_BATCH = 1000  # MLflow's limits
_PARAMS_A_BATCH = 100
_A_PAGE = 1000
KIND_TAG = "mlflow.experimentKind"  # MLflow's pages show training curves first, not chats
RUNNING = "RUNNING"


def run_status(run_id: str) -> str:
    """`RUNNING`, `FINISHED`, `FAILED` or `KILLED`."""
    return str(run(run_id)["info"]["status"])


def set_run_status(run_id: str, status: str, milliseconds: int | None) -> None:
    """Close a run at a time since 1970, or open it again with `RUNNING` and None."""
    body = {"run_id": run_id, "status": status}
    _call("POST", "runs/update", body | ({"end_time": milliseconds} if milliseconds else {}))


def experiment_id(name: str) -> str:
    """The id of an experiment, made where missing; two that make it at once both get it."""
    import httpx

    if found := _unless_missing("experiments/get-by-name", {"experiment_name": name}):
        return str(found["experiment"]["experiment_id"])
    tags = [{"key": KIND_TAG, "value": "custom_model_development"}]
    try:
        made = _call("POST", "experiments/create", {"name": name, "tags": tags})
    except httpx.HTTPStatusError:
        found = _unless_missing("experiments/get-by-name", {"experiment_name": name})
        if found is None:
            raise
        return str(found["experiment"]["experiment_id"])
    return str(made["experiment_id"])


def create_run(experiment: str, name: str, tags: Mapping[str, str]) -> str:
    """Make a run; one request at most is sent, as an answer that was lost may have left one."""
    body = {"experiment_id": experiment, "run_name": name, "start_time": int(time.time() * 1000)}
    pairs = [{"key": key, "value": value} for key, value in tags.items()]
    made = _call("POST", "runs/create", body | {"tags": pairs}, _not_sent)
    return str(made["run"]["info"]["run_id"])


def run(run_id: str) -> dict[str, Any]:
    """A run as the server has it: `info` and `data`."""
    found: dict[str, Any] = _call("GET", "runs/get", {"run_id": run_id})["run"]
    return found


def oldest_run(condition: str, experiments: Sequence[str] = ()) -> dict[str, Any] | None:
    """The first run that a search finds, if there is one; without experiments, in all of them."""
    if not experiments:
        all_of_them = _pages("experiments/search", "experiments")
        experiments = [each["experiment_id"] for each in all_of_them]
    query = {"experiment_ids": list(experiments), "filter": condition, "max_results": 1}
    found = _call("POST", "runs/search", query | {"order_by": ["attributes.start_time ASC"]})
    runs: list[dict[str, Any]] = found.get("runs", [])
    return runs[0] if runs else None


def log_params(run_id: str, params: Mapping[str, str]) -> None:
    """Write params; one that is there with the same value is no error."""
    pairs = [{"key": key, "value": value} for key, value in params.items()]
    for batch in _batches(pairs, _PARAMS_A_BATCH):
        _call("POST", "runs/log-batch", {"run_id": run_id, "params": batch})


def log_param_once(run_id: str, key: str, value: str) -> bool:
    """Write one param; False where it is there with another value, which then stays.

    It is one row under a primary key: of several writers at once, one succeeds.
    """
    import httpx

    try:
        _call("POST", "runs/log-parameter", {"run_id": run_id, "key": key, "value": value})
    except httpx.HTTPStatusError:
        params = {each["key"]: each["value"] for each in run(run_id)["data"].get("params", [])}
        if key not in params:  # it failed for another reason
            raise
        return bool(params[key] == value)
    return True


def log_points(run_id: str, points: Sequence[Point]) -> None:
    """Write points; one that is there already, time and all, is not written again."""
    metrics = [
        {"key": each.key, "value": _number(each.value), "step": each.step}
        | {"timestamp": each.milliseconds}
        for each in points
    ]
    for batch in _batches(metrics, _POINTS_A_BATCH):
        _call("POST", "runs/log-batch", {"run_id": run_id, "metrics": batch})


def set_tags(run_id: str, tags: Mapping[str, str]) -> None:
    """Write tags."""
    pairs = [{"key": key, "value": value} for key, value in tags.items()]
    _call("POST", "runs/log-batch", {"run_id": run_id, "tags": pairs})


def registered_model(name: str) -> dict[str, Any] | None:
    """A name in the registry, with its aliases; None where there is none."""
    found = _unless_missing("registered-models/get", {"name": name})
    return found and found["registered_model"]


def model_versions(name: str) -> list[dict[str, Any]]:
    """All versions of a model."""
    return list(_pages("model-versions/search", "model_versions", {"filter": f"name = '{name}'"}))


def registered_models() -> list[dict[str, Any]]:
    """All names in the registry, in their order, with their aliases and newest versions."""
    query = {"order_by": "name ASC"}
    return list(_pages("registered-models/search", "registered_models", query))


def create_registered_model(name: str, tags: Mapping[str, str]) -> bool:
    """Make a name in the registry, tags included; False where it is there."""
    import httpx

    pairs = [{"key": key, "value": value} for key, value in tags.items()]
    try:
        _call("POST", "registered-models/create", {"name": name, "tags": pairs})
    except httpx.HTTPStatusError as error:
        if error.response.json().get("error_code") != "RESOURCE_ALREADY_EXISTS":
            raise
        return False
    return True


def set_model_tag(name: str, key: str, value: str) -> None:
    """Tag a name in the registry."""
    _call("POST", "registered-models/set-tag", {"name": name, "key": key, "value": value})


def set_alias(name: str, alias: str, version: int) -> None:
    """Let an alias name a version; a reader sees the old one or the new one."""
    body = {"name": name, "alias": alias, "version": str(version)}
    _call("POST", "registered-models/alias", body)


def delete_alias(name: str, alias: str) -> None:
    """Take an alias away; one that is not there is no error."""
    _call("DELETE", "registered-models/alias", {"name": name, "alias": alias})


def artifact_address(name: str, version: int) -> str:
    """Where the files of a version lie: a path or a URL."""
    query = {"name": name, "version": str(version)}
    return str(_call("GET", "model-versions/get-download-uri", query)["artifact_uri"])


def _pages(
    path: str, key: str, query: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[dict[str, Any]]:
    """What a search finds, page by page."""
    token = ""
    while True:
        values = {**query, "max_results": _A_PAGE} | ({"page_token": token} if token else {})
        answer = _call("GET", path, values)
        yield from answer.get(key, [])
        token = answer.get("next_page_token", "")
        if not token:
            return


def _number(value: float) -> float | str:
    """As Protocol Buffers write it: JSON itself knows no infinity."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _unless_missing(path: str, values: dict[str, Any]) -> Any | None:
    import httpx

    try:
        return _call("GET", path, values)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.NOT_FOUND:
            return None
        raise


def _batches(values: list[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    yield from (values[start : start + size] for start in range(0, len(values), size))


def _call(
    method: str,
    path: str,
    values: dict[str, Any],
    again: Callable[[BaseException], bool] | None = None,
) -> Any:
    """The answer; a server that is away is asked as often as MLflow's own client would.

    Raises:
        httpx.HTTPError: with the server's own words where it gave some.
    """
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

    retrying = Retrying(
        retry=retry_if_exception(again or _may_pass),
        stop=stop_after_attempt(1 + int(os.environ.get(RETRIES, _RETRIES))),
        wait=wait_exponential(multiplier=2),  # 2, 4, 8, … s
        reraise=True,
    )
    return retrying(_ask, method, path, values)


def _may_pass(error: BaseException) -> bool:
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _PASSING
    return isinstance(error, httpx.TransportError)


def _not_sent(error: BaseException) -> bool:
    import httpx

    return isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))


def _ask(method: str, path: str, values: dict[str, Any]) -> Any:
    import httpx

    url = f"{load_settings().mlflow_url.rstrip('/')}{_API}/{path}"
    response = httpx.request(
        method,
        url,
        params=values if method == "GET" else None,
        json=None if method == "GET" else values,
        timeout=_TIMEOUT_S,
        auth=_login(),
        headers=_bearer(),
        verify=_certificates(),
    )
    if response.is_error:
        raise httpx.HTTPStatusError(
            f"MLflow answered {response.status_code} to {path}: {response.text[:500]}",
            request=response.request,
            response=response,
        )
    return response.json()


@cache
def _certificates() -> "ssl.SSLContext":
    """Read once a process: that takes longer than a request."""
    import httpx

    return httpx.create_ssl_context()


def _login() -> tuple[str, str] | None:
    user, password = (
        os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD")
    )
    return (user, password) if user and password else None


def _bearer() -> dict[str, str]:
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}
