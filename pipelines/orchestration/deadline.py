"""A deadline for DAG runs: a late run is posted to the webhook and continues."""

import asyncio
import os
from datetime import timedelta
from typing import Any

from airflow.sdk.definitions.callback import AsyncCallback
from airflow.sdk.definitions.deadline import DeadlineAlert, DeadlineReference

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.orchestration.webhook import Notice, alerts_of, post

VARIABLE = "PENSTOCK_DEADLINE_HOURS"  # counted from when a run is queued; no deadline by default


def deadline(hours: float | None = None) -> DeadlineAlert | None:
    """Return an alert that reports a run once if it is not over in time after it was queued.

    Args:
        hours: The time; if None, that of the environment variable.

    Raises:
        UserError: The environment variable is not a number of hours.
    """
    text = str(hours or os.environ.get(VARIABLE) or "")
    if not text:
        return None
    try:
        interval = timedelta(hours=float(text))
    except (ValueError, OverflowError):
        raise UserError(f"{VARIABLE}={text!r} is not a number of hours") from None
    return DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=interval,
        callback=AsyncCallback(post_late, {"hours": float(text)}),
    )


async def post_late(**values: Any) -> None:
    """Post that the run is late; the triggerer calls it at the deadline."""
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
        alerts=alerts_of(dag_id),
    )
    await asyncio.to_thread(post, notice)
