"""The platform's parts: their names, addresses and health checks."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelines.core.settings import Settings
from pipelines.platform.supervisor import Process

_TIMEOUT_S = 5.0

Check = Callable[[Settings, Process], bool]


@dataclass(frozen=True)
class Part:
    """One program of supervisord.conf."""

    name: str
    answers: Check
    url: Callable[[Settings], str | None] = lambda _: None


def _airflow_answers(component: str) -> Check:
    """Return a check that the database has the component's heartbeat from this very process."""

    def answers(settings: Settings, process: Process) -> bool:
        health = _get_json(f"{settings.airflow_url}/api/v2/monitor/health")
        if health is None:
            return False
        heartbeat = health[component].get(f"latest_{component}_heartbeat")
        return (
            health[component]["status"] == "healthy"
            and heartbeat is not None
            and datetime.fromisoformat(heartbeat).timestamp() >= process.started
        )

    return answers


def _api_server_answers(settings: Settings, _: Process) -> bool:
    health = _get_json(f"{settings.airflow_url}/api/v2/monitor/health")
    return health is not None and health["metadatabase"]["status"] == "healthy"


def _mlflow_answers(settings: Settings, _: Process) -> bool:
    return _get(f"http://127.0.0.1:{settings.mlflow_port}/health") is not None


def _ray_answers(settings: Settings, _: Process) -> bool:
    token = settings.ray_token_path.read_text()
    base = f"http://127.0.0.1:{settings.ray_port}/api/v0"
    # The dashboard answers before there is a node, and a node is there before its agent, which
    # takes the jobs. The second request passes through the agent. It names the node by its id, as
    # a node that has died may have had the same address.
    head = "filter_keys=is_head_node&filter_predicates=%3D&filter_values=true"
    found = _get_json(f"{base}/nodes?{head}", bearer=token)
    nodes = found["data"]["result"]["result"] if found else []
    return any(
        _get(f"{base}/logs?node_id={each['node_id']}&glob=raylet.out", bearer=token) is not None
        for each in nodes
    )


def _reconciler_answers(settings: Settings, process: Process) -> bool:
    passed = reconciled_path(settings)
    return passed.exists() and passed.stat().st_mtime >= process.started


PARTS = (
    Part("ray", _ray_answers, lambda settings: settings.ray_url),
    Part("mlflow", _mlflow_answers, lambda settings: settings.mlflow_url),
    Part("api-server", _api_server_answers, lambda settings: settings.airflow_url),
    Part("scheduler", _airflow_answers("scheduler")),
    Part("dag-processor", _airflow_answers("dag_processor")),
    Part("triggerer", _airflow_answers("triggerer")),
    Part("reconciler", _reconciler_answers),
)
NAMES = tuple(part.name for part in PARTS)
AIRFLOW = ("api-server", "scheduler", "dag-processor", "triggerer")


def reconciled_path(settings: Settings) -> Path:
    """Return the path of the file that the reconciler touches after each pass."""
    return settings.home / "services" / "reconciled"


def _get_json(url: str, bearer: str | None = None) -> Any:
    body = _get(url, bearer)
    return None if body is None else json.loads(body)


def _get(url: str, bearer: str | None = None) -> bytes | None:
    """Return the body of a 200 answer, or None while the part does not answer."""
    request = urllib.request.Request(url)  # noqa: S310 (our own http address)
    if bearer:
        request.add_header("Authorization", f"Bearer {bearer}")
    # A request on the loopback must not use a proxy from the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            body: bytes = response.read()
            return body
    except (urllib.error.URLError, OSError):
        return None
