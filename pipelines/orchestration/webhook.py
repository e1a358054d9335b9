"""Send one JSON POST to `PENSTOCK_WEBHOOK_URL` for each DAG run that failed or is late.

The address may hold a secret, so it is never logged. If the webhook is down, no task fails.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import httpx
from pydantic import BaseModel, ConfigDict

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.core.storage import read_json, write_json
from pipelines.orchestration.naming import dag_run_workspace
from pipelines.recipe.recipe_files import known_recipes, load_recipe
from pipelines.recipe.schedule_section import REFRESH
from pipelines.stages.stage_process import FAILURE_FILE

if TYPE_CHECKING:
    from airflow.sdk import Context

VARIABLE = "PENSTOCK_WEBHOOK_URL"
FILE = "webhook-url"  # among the secrets, if the variable is not set
_TIMEOUT_S = 10.0
_CONNECTS = 3  # tries to connect; a request that was sent is not sent again
_log = logging.getLogger(__name__)


class Notice(BaseModel):
    """The body of the request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    event: Literal["failed", "late"]
    dag: str
    run: str
    task: str | None  # the task that failed
    error: str  # one line
    links: dict[str, str]  # run, log, mlflow
    alerts: tuple[str, ...] = ()  # `schedule.alerts` of the recipe that the DAG runs


def post(notice: Notice) -> bool:
    """Send a notice if a webhook is set; return whether it was accepted."""
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
            "the webhook did not accept the notice about %s: %s", notice.run, type(error).__name__
        )
        return False
    if answer.is_error:
        _log.warning(
            "the webhook answered %d to the notice about %s", answer.status_code, notice.run
        )
    return not answer.is_error


def alerts_of(dag: str) -> tuple[str, ...]:
    """Return the addresses that the recipe of either of its DAGs names; empty for another DAG."""
    name = dag.removesuffix(REFRESH)
    try:
        return load_recipe(name).schedule.alerts if name in known_recipes() else ()
    except UserError:  # a recipe that was broken since has an import error of its own
        return ()


def keep_failure(context: "Context") -> None:
    """Write why a task finally failed, for the notice of its run; a task callback."""
    error = context.get("exception")
    text = " ".join(str(error).split()) or type(error).__name__
    line = text if error is not None else "its process was lost"
    write_json(
        dag_run_workspace(context) / FAILURE_FILE, {"task": context["ti"].task_id, "error": line}
    )


def failure_line(workspace: Path, task: str | None) -> str:
    """Return the one line of the error that ended a task."""
    path = workspace / FAILURE_FILE
    failure = read_json(path) if path.is_file() else {}
    return str(failure["error"]) if failure.get("task") == task else "see the task's log"


def _address() -> str | None:
    path = load_settings().secrets / FILE
    url = os.environ.get(VARIABLE) or (path.read_text(encoding="utf-8") if path.is_file() else "")
    return url.strip() or None
