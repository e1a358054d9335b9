"""A few calls of MLflow's REST API, for processes that can't wait seconds for its client's import.

Who speaks to the server is read from MLflow's own variables, as its client does.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from pipelines.core.settings import load_settings
from pipelines.tracking.run import Point

_API = "/api/2.0/mlflow"
_TIMEOUT_S = 10.0
RUNNING = "RUNNING"


def run_status(run_id: str) -> str:
    """`RUNNING`, `FINISHED`, `FAILED` or `KILLED`."""
    answer = _call("GET", "runs/get", {"run_id": run_id})
    return str(answer["run"]["info"]["status"])


def set_run_status(run_id: str, status: str, milliseconds: int | None) -> None:
    """Close a run at a time since 1970, or open it again with `RUNNING` and None."""
    body = {"run_id": run_id, "status": status}
    _call("POST", "runs/update", body | ({"end_time": milliseconds} if milliseconds else {}))


def log_points(run_id: str, points: Sequence[Point]) -> None:
    """Write points; one that is there already, time and all, is not written again."""
    metrics = [
        {"key": each.key, "value": each.value, "timestamp": each.milliseconds, "step": each.step}
        for each in points
    ]
    _call("POST", "runs/log-batch", {"run_id": run_id, "metrics": metrics})


def set_tags(run_id: str, tags: Mapping[str, str]) -> None:
    """Write tags."""
    pairs = [{"key": key, "value": value} for key, value in tags.items()]
    _call("POST", "runs/log-batch", {"run_id": run_id, "tags": pairs})


def _call(method: str, path: str, values: dict[str, Any]) -> Any:
    """The answer; raises httpx.HTTPError, with the server's own words where it gave some."""
    url = f"{load_settings().mlflow_url.rstrip('/')}{_API}/{path}"
    response = httpx.request(
        method,
        url,
        params=values if method == "GET" else None,
        json=None if method == "GET" else values,
        timeout=_TIMEOUT_S,
        auth=_login(),
        headers=_bearer(),
    )
    if response.is_error:
        raise httpx.HTTPStatusError(
            f"MLflow answered {response.status_code} to {path}: {response.text[:500]}",
            request=response.request,
            response=response,
        )
    return response.json()


def _login() -> httpx.BasicAuth | None:
    user, password = (
        os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD")
    )
    return httpx.BasicAuth(user, password) if user and password else None


def _bearer() -> dict[str, str]:
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}
