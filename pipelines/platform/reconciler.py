"""Stop Ray jobs that no task waits for: the last of the three ways in which a job is cancelled.

This part of the platform repeats `reconcile_once`. It reads Airflow's state of each live job's
task, needs neither the triggerer nor a worker, and stops nothing while Airflow or Ray is away.
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
from pipelines.orchestration.jobs_api import (
    ADDRESS_FILE,
    TOKEN_FILE,
    Job,
    JobsApi,
    jobs_api,
    ray_address,
)
from pipelines.orchestration.task_liveness import OVER
from pipelines.platform.airflow_api import AirflowApi
from pipelines.platform.parts import reconciled_path
from pipelines.platform.watch import CLEARS, Watch, is_cleared_by

_EVERY_S = 4.0  # Ray needs 3 s more for a stop, and an orphan must be gone after 15 s
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
    began: str  # when the try that submitted the job began, ISO 8601

    @property
    def state(self) -> JobState:
        """The state of the task's job in its workspace."""
        return JobState.of(Path(self.workspace), self.task_id, self.map_index)


def reconcile_once(
    settings: Settings, airflow: Callable[[], AirflowApi] | None = None
) -> list[str]:
    """Stop each live job whose task is over, cleared or gone; return the jobs' submission ids.

    Jobs of other homes and jobs that a user submitted are left alone.

    Args:
        settings: The addresses of Airflow and Ray.
        airflow: Returns a client; by default a new one.

    Raises:
        UserError, httpx.HTTPError: Airflow or Ray is away.
    """
    return asyncio.run(_reconcile(settings, airflow or partial(AirflowApi, settings)))


async def _reconcile(settings: Settings, open_airflow: Callable[[], AirflowApi]) -> list[str]:
    stopped = []
    for workspace in _with_clusters(settings):
        try:
            stopped += await _reconcile_cluster(jobs_api(workspace), settings, open_airflow)
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # a problem of this run only
            _tell_once(
                f"the cluster of {workspace.name} could not be checked: {type(error).__name__}"
            )
    platform = JobsApi(settings.ray_url, settings.ray_token_path)
    return stopped + await _reconcile_cluster(platform, settings, open_airflow)


def _with_clusters(settings: Settings) -> list[Path]:
    """Return a workspace for each cluster that a run or a connection names; many may name one."""
    found = {}
    for file in settings.runs.glob(f"*/{ADDRESS_FILE}"):
        token = file.with_name(TOKEN_FILE)
        login = ray_address(file.parent), token.read_bytes() if token.is_file() else b""
        found[login] = file.parent
    return [*found.values()]


@cache
def _tell_once(message: str) -> None:
    """Log a warning once, because an absent head node stays absent for many passes."""
    _log.warning("%s", message)


async def _reconcile_cluster(
    cluster: JobsApi, settings: Settings, open_airflow: Callable[[], AirflowApi]
) -> list[str]:
    stopped = []
    async with cluster as jobs:
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
    """Return why no task waits for a job any more, or None if one does."""
    name = f"task {owner.task_id} of {owner.dag_id} {owner.dag_run_id}"
    task: dict[str, Any] | None = airflow.task(
        owner.dag_id, owner.dag_run_id, owner.task_id, owner.map_index
    )
    if task is None:
        # If the workspace does not know the job either, it belongs to another Airflow.
        ours = job.submission_id in owner.state.read().submissions
        return f"{name} is unknown to Airflow" if ours else None
    if task["state"] in OVER:
        return f"{name} is {task['state']}"
    # In any other state the task runs, waits for its job or will find it again, unless cleared.
    if task["max_tries"] > owner.max_tries or _cleared_as_it_handed_over(airflow, owner):
        return f"{name} was cleared"
    return None


def _cleared_as_it_handed_over(airflow: AirflowApi, owner: Owner) -> bool:
    """Return whether a user cleared the task between the job's submission and the defer.

    Airflow then neither ends the process nor raises `max_tries`; only its log of users' actions
    distinguishes this from a try that failed.
    """
    events = airflow.events(CLEARS, owner.began)
    return any(
        is_cleared_by(event, owner.dag_id, owner.dag_run_id, owner.task_id, owner.map_index)
        for event in events
    )


def main() -> None:
    """Reconcile and watch until the process is ended."""
    set_up_logging()
    bypass_proxy_on_loopback()
    settings = load_settings()
    reconciled_path(settings).parent.mkdir(parents=True, exist_ok=True)
    watch = Watch(settings)
    airflow = cache(partial(AirflowApi, settings))  # one login, once Airflow has answered
    looks: list[Callable[[], object]] = [
        partial(reconcile_once, settings, airflow),
        partial(watch.look, airflow),
    ]
    said: dict[int, str] = {}  # the problem of each pass, logged once
    while True:
        for number, look in enumerate(looks):
            trouble = _trouble(look)
            if trouble != said.get(number, ""):
                said[number] = trouble
                _log.warning("%s", trouble or "all services answer again")
        reconciled_path(settings).touch()
        time.sleep(_EVERY_S)


def _trouble(look: Callable[[], object]) -> str:
    """Run one pass; return why it failed, or '': a service that is away may be back next time."""
    try:
        look()
    except (UserError, httpx.HTTPError, OSError, xmlrpc.client.Error) as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
