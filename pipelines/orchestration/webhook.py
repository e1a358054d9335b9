"""One JSON POST for each DAG run that failed, or is late, to the address of `PENSTOCK_WEBHOOK_URL`.

The address may hold a secret: it is never logged. A webhook that is down fails nothing.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import httpx
from pydantic import BaseModel, ConfigDict

from pipelines.core.settings import load_settings
from pipelines.core.storage import read_json, write_json
from pipelines.orchestration.naming import dag_run_workspace

if TYPE_CHECKING:
    from airflow.sdk import Context

VARIABLE = "PENSTOCK_WEBHOOK_URL"
FILE = "webhook-url"  # among the secrets, where the variable is not set
_FAILURE = "failure.json"  # in a workspace: the task that failed last, and why
_TIMEOUT_S = 10.0
_CONNECTS = 3  # tries to connect; a request that was sent is not sent again
_log = logging.getLogger(__name__)


class Notice(BaseModel):
    """The body of the request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    event: Literal["failed", "late"]
    dag: str
    run: str
    task: str | None  # that failed
    error: str  # one line
    links: dict[str, str]  # run, log, mlflow


def post(notice: Notice) -> bool:
    """Send a notice where a webhook is set; whether it was taken."""
    url = _address()
    if url is None:
        return False
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log the address
    try:
        with httpx.Client(
            transport=httpx.HTTPTransport(retries=_CONNECTS), timeout=_TIMEOUT_S
        ) as client:
            answer = client.post(url, json=notice.model_dump())
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # its text holds the address
        _log.warning(
            "the webhook did not take the news of %s: %s", notice.run, type(error).__name__
        )
        return False
    if answer.is_error:
        _log.warning("the webhook answered %d to the news of %s", answer.status_code, notice.run)
    return not answer.is_error


def keep_failure(context: "Context") -> None:
    """Task callback: why a task failed for good, for the notice of its run."""
    error = context.get("exception")
    text = " ".join(str(error).split()) or type(error).__name__
    line = text if error is not None else "its process was lost"
    write_json(
        dag_run_workspace(context) / _FAILURE, {"task": context["ti"].task_id, "error": line}
    )


def failure_line(workspace: Path, task: str | None) -> str:
    """The one line of the error that ended a task."""
    path = workspace / _FAILURE
    failure = read_json(path) if path.is_file() else {}
    return str(failure["error"]) if failure.get("task") == task else "see the task's log"


def _address() -> str | None:
    path = load_settings().secrets / FILE
    url = os.environ.get(VARIABLE) or (path.read_text(encoding="utf-8") if path.is_file() else "")
    return url.strip() or None
