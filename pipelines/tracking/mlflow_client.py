"""Requests of MLflow's REST API: who asks, how long one waits, and what is asked again.

Who speaks to the server is read from MLflow's own variables, as its client does. httpx is imported
with the first request only: of a job's many processes few make one.

MLflow's own client, whose import takes seconds: what has none to spare speaks by `rest`.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipelines.core.errors import one_line
from pipelines.core.settings import load_settings

if TYPE_CHECKING:
    import ssl

    import httpx
    from mlflow import MlflowClient

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Some 13 s in all: a user waits (MLflow's own default goes on for four minutes).
    RETRIES: "3",
}
# Two minutes, for a stage, whose work is worth waiting for: a server is restarted meanwhile.
PATIENT = {RETRIES: "6"}


def open_client(url: str | None = None) -> "MlflowClient":
    """Return a client of the tracking server and registry at `url`, or where the settings say.

    A request that fails is retried for some 13 s, in a stage for two minutes, and then raises
    MlflowException.
    """
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from mlflow import MlflowClient

    return MlflowClient(url or load_settings().mlflow_url)


_API = "/api/2.0/mlflow"
_TIMEOUT_S = 10.0
_RETRIES = 3
_PASSING = (429, 500, 502, 503, 504)  # answers that a later try may not get
_A_PAGE = 1000


def call(
    method: str,
    path: str,
    values: dict[str, Any],
    again: Callable[[BaseException], bool] | None = None,
) -> Any:
    """Return the answer; a server that is away is asked as often as MLflow's own client would.

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


def call_unless_missing(path: str, values: dict[str, Any]) -> Any | None:
    """Return the answer to a GET; None where the server knows nothing of the kind."""
    import httpx

    try:
        return call("GET", path, values)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.NOT_FOUND:
            return None
        raise


def pages(
    path: str, key: str, query: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[dict[str, Any]]:
    """Yield what a search finds, page by page."""
    token = ""
    while True:
        values = {**query, "max_results": _A_PAGE} | ({"page_token": token} if token else {})
        answer = call("GET", path, values)
        yield from answer.get(key, [])
        before, token = token, answer.get("next_page_token", "")
        if token in ("", before):  # the same page again would come for ever
            return


def _may_pass(error: BaseException) -> bool:
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _PASSING
    return isinstance(error, httpx.TransportError)


def server_version() -> str:
    """Return what the server says of itself; it is asked once.

    Raises:
        httpx.HTTPError: it does not answer, or does not let this user in.
    """
    import httpx

    response = httpx.get(
        f"{load_settings().mlflow_url.rstrip('/')}/version",
        timeout=_TIMEOUT_S,
        auth=_login(),
        headers=_bearer(),
        verify=_certificates(),
    )
    return response.raise_for_status().text.strip()


def not_sent(error: BaseException) -> bool:
    """Return whether the server has not even seen the request, which then can do no harm twice."""
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
    return _content(response, path)


# What MLflow's answers hold under these keys, wherever they stand.
_OBJECTS = {"run", "info", "data", "experiment", "registered_model"}
_LISTS = {"runs", "params", "tags", "metrics", "aliases", "experiments", "registered_models"}
_LISTS |= {"model_versions", "latest_versions"}
_TEXTS = {"run_id", "experiment_id", "status", "artifact_uri", "key", "alias", "next_page_token"}
_NUMBERS = {"version", "creation_timestamp"}


def _fits(key: str, value: Any) -> bool:
    if key in _NUMBERS:
        return str(value).isdecimal() and len(str(value)) < 20
    if key in _LISTS:
        return isinstance(value, list) and all(isinstance(each, dict) for each in value)
    kind = dict if key in _OBJECTS else str if key in _TEXTS else object
    return isinstance(value, kind)


def _content(response: "httpx.Response", path: str) -> Any:
    import httpx

    class Values(dict[str, Any]):
        def __init__(self, found: dict[str, Any]) -> None:
            if wrong := [key for key, value in found.items() if not _fits(key, value)]:
                raise ValueError(f"{wrong[0]} is of another kind")
            super().__init__(found)

        def __missing__(self, key: str) -> Any:
            raise httpx.DecodingError(f"MLflow's answer to {path} has no {key!r}")

    try:
        values = json.loads(response.content, object_hook=Values)
        if not isinstance(values, dict):
            raise ValueError("it is no object")
        return values
    except (ValueError, RecursionError) as error:
        raise httpx.DecodingError(
            f"MLflow's answer to {path} is none: {one_line(error)}"
        ) from error


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
