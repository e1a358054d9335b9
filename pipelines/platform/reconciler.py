"""Stops Ray jobs that nobody waits for: the last of the three lines of cancelling.

A part of the platform; `reconcile_once` is one pass. It reads what Airflow says of each live job's
task, needs neither the triggerer nor a worker, and decides nothing while Airflow or Ray is away.
"""

import asyncio
import logging
import time
import xmlrpc.client
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.core.errors import UserError
from pipelines.core.log import set_up_logging
from pipelines.core.settings import Settings, bypass_proxy_on_loopback, load_settings
from pipelines.orchestration.job_state import JobState
from pipelines.orchestration.jobs_api import ADDRESS_FILE, Job, JobsApi, ray_address
from pipelines.orchestration.task_liveness import OVER
from pipelines.platform.airflow_api import AirflowApi
from pipelines.platform.parts import reconciled_path
from pipelines.platform.watch import CLEARS, Watch, is_cleared_by

_EVERY_S = 4.0  # a stop takes Ray 3 s more, and an orphan is to be gone after 15
_PREFIX = "penstock-"

_log = logging.getLogger(__name__)


class Owner(BaseModel):
    """The task that a job was submitted for, in the job's metadata."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    home: str
    workspace: str
    dag_id: str
    dag_run_id: str
    task_id: str
    map_index: int
    max_tries: int
    began: str  # when the try that submitted the job did, ISO 8601

    @property
    def state(self) -> JobState:
        """The task's state in its workspace."""
        return JobState.of(Path(self.workspace), self.task_id, self.map_index)


def reconcile_once(
    settings: Settings, airflow: Callable[[], AirflowApi] | None = None
) -> list[str]:
    """Stop each live job whose task is over, cleared or gone; return the jobs' submission ids.

    Jobs of other homes, and those that a user submitted, are left alone.

    Args:
        settings: where Airflow and Ray are.
        airflow: gives a client; a new one by default.

    Raises:
        UserError, httpx.HTTPError: Airflow or Ray is away.
    """
    return asyncio.run(_reconcile(settings, airflow or partial(AirflowApi, settings)))


async def _reconcile(settings: Settings, open_airflow: Callable[[], AirflowApi]) -> list[str]:
    stopped = []
    for file in settings.runs.glob(f"*/{ADDRESS_FILE}"):
        try:
            stopped += await _reconcile_cluster(ray_address(file.parent), settings, open_airflow)
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # of one run, and of no other
            _tell_once(
                f"the cluster of {file.parent.name} was not looked at: {type(error).__name__}"
            )
    return stopped + await _reconcile_cluster(settings.ray_url, settings, open_airflow)


@cache
def _tell_once(message: str) -> None:
    """A head that is away stays so for many looks."""
    _log.warning("%s", message)


async def _reconcile_cluster(
    ray: str, settings: Settings, open_airflow: Callable[[], AirflowApi]
) -> list[str]:
    stopped = []
    async with JobsApi(ray, settings.ray_token_path) as jobs:
        owned = [(job, _owner(job, settings)) for job in await jobs.jobs() if job.live]
        if not any(owner for _, owner in owned):
            return []
        airflow = open_airflow()
        for job, owner in owned:
            if owner is None or (reason := _orphaned(airflow, job, owner)) is None:
                continue
            submission_id = str(job.submission_id)
            _log.info("stopping %s: %s", submission_id, reason)
            owner.state.close(submission_id)
            await jobs.stop(submission_id)
            stopped.append(submission_id)
    return stopped


def _owner(job: Job, settings: Settings) -> Owner | None:
    if not (job.submission_id or "").startswith(_PREFIX):
        return None
    try:
        owner = Owner.model_validate(job.metadata)
    except ValidationError:
        return None
    return owner if owner.home == str(settings.home) else None


def _orphaned(airflow: AirflowApi, job: Job, owner: Owner) -> str | None:
    """Why nobody waits for a job any more, None where somebody does."""
    name = f"task {owner.task_id} of {owner.dag_id} {owner.dag_run_id}"
    task: dict[str, Any] | None = airflow.task(
        owner.dag_id, owner.dag_run_id, owner.task_id, owner.map_index
    )
    if task is None:
        # Another Airflow's, where the workspace doesn't know of the job either.
        ours = job.submission_id in owner.state.read().submissions
        return f"{name} is unknown to Airflow" if ours else None
    if task["state"] in OVER:
        return f"{name} is {task['state']}"
    # In any other state it runs, waits for its job, or is about to find it again, unless cleared.
    if task["max_tries"] > owner.max_tries or _cleared_as_it_handed_over(airflow, owner):
        return f"{name} was cleared"
    return None


def _cleared_as_it_handed_over(airflow: AirflowApi, owner: Owner) -> bool:
    """Whether the Clear met the task between the job's submission and the defer.

    Airflow then neither ends the process nor raises `max_tries`; only its log of what users do
    tells it from a try that failed.
    """
    events = airflow.events(CLEARS, owner.began)
    return any(
        is_cleared_by(event, owner.dag_id, owner.dag_run_id, owner.task_id, owner.map_index)
        for event in events
    )


def main() -> None:
    """Reconcile and watch until ended."""
    set_up_logging()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    bypass_proxy_on_loopback()
    settings = load_settings()
    watch = Watch(settings)
    airflow = cache(partial(AirflowApi, settings))  # one login, once Airflow has answered
    looks: list[Callable[[], object]] = [
        partial(reconcile_once, settings, airflow),
        partial(watch.look, airflow),
    ]
    said: dict[int, str] = {}  # what keeps each of them from looking, once in the log
    while True:
        for number, look in enumerate(looks):
            trouble = _trouble(look)
            if trouble != said.get(number, ""):
                said[number] = trouble
                _log.warning("%s", trouble or "all answer again")
        reconciled_path(settings).touch()
        time.sleep(_EVERY_S)


def _trouble(look: Callable[[], object]) -> str:
    """Why it could not look now, empty where it could: what is away now may be back next time."""
    try:
        look()
    except (UserError, httpx.HTTPError, OSError, xmlrpc.client.Error) as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
