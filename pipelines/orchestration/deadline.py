"""A deadline for DAG runs: one that is late is posted to the webhook, and goes on."""

import asyncio
import os
from datetime import timedelta
from typing import Any

from airflow.sdk.definitions.callback import AsyncCallback
from airflow.sdk.definitions.deadline import DeadlineAlert, DeadlineReference

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.orchestration.webhook import Notice, post

VARIABLE = "PENSTOCK_DEADLINE_HOURS"  # from a run's queueing; none by default


def deadline() -> DeadlineAlert | None:
    """A run that is not over so many hours after it was queued is posted, once, as late.

    Raises:
        UserError: the environment names no number of hours.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        interval = timedelta(hours=float(text))
    except (ValueError, OverflowError):
        raise UserError(f"{VARIABLE}={text!r}: not a number of hours") from None
    return DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=interval,
        callback=AsyncCallback(post_late, {"hours": float(text)}),
    )


async def post_late(**values: Any) -> None:
    """Deadline callback, in the triggerer: the run is not over in time."""
    run = values["context"]["dag_run"]
    dag_id, run_id = run["dag_id"], run["dag_run_id"]
    link = f"{load_settings().airflow_url}/dags/{dag_id}/runs/{run_id}"
    notice = Notice(
        event="late",
        dag=dag_id,
        run=run_id,
        task=None,
        error=f"not over after {values['hours']:g} hours",
        links={"run": link},
    )
    await asyncio.to_thread(post, notice)
