"""A Ray job as an Airflow task: submitted once, reattached, followed and cancelled.

The submission id is `penstock-<hash(dag, run, task, map index, generation)>-<n>`. A task walks
n = 0, 1, …: absent → submit; pending or running → attach; succeeded with a valid result → done;
failed or stopped → the next n. Ray refuses a known id, so two walkers can't make two jobs.
"""

import asyncio
import hashlib
import shlex
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import httpx
from airflow.sdk import BaseOperator, BaseOperatorLink
from airflow.sdk.exceptions import AirflowFailException, AirflowTaskTerminated, TaskDeferred
from airflow.triggers.base import BaseTrigger, TriggerEvent

from pipelines.core.progress import ProgressReader
from pipelines.core.settings import load_settings
from pipelines.orchestration.job_state import JobState
from pipelines.orchestration.jobs_api import Job, JobsApi
from pipelines.orchestration.links import RayJobLink
from pipelines.stages.runner import (
    RAY_JOB_VARIABLE,
    forget_error,
    stage_variables,
    user_error,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

_UNREACHABLE_S = 60.0  # without an answer from Ray until its cluster counts as gone


def jobs_api() -> JobsApi:
    """The Jobs API of the settings' Ray cluster."""
    settings = load_settings()
    return JobsApi(settings.ray_url, settings.ray_token_path)


class RayJobOperator(BaseOperator):
    """Runs a command as a Ray job and defers, so that it holds no worker slot.

    Args:
        entrypoint: the shell command, run in the workspace with its code first on PYTHONPATH.
        workspace: a folder that Airflow and Ray share; the job's progress is read from its
            `progress.jsonl`, a person's error from its `error.json`.
        poll_seconds: between two looks at the job.
    """

    template_fields = ("workspace",)
    operator_extra_links: Collection[BaseOperatorLink] = (RayJobLink(),)

    def __init__(
        self,
        *,
        entrypoint: str,
        workspace: str,
        poll_seconds: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.entrypoint = entrypoint
        self.workspace = workspace
        self.poll_seconds = poll_seconds
        self.links: dict[str, str] = {}
        self._submission_id: str | None = None
        self._state: JobState | None = None

    def execute(self, context: "Context") -> Any:
        """Attach to the task's job, or submit it, and defer until it ends."""
        state = self._open_state(context)
        submission_id, job = asyncio.run(self._walk(_job_key(context, state.generation())))
        if job is None:
            forget_error(Path(self.workspace))
        if (job is None and self.skip()) or (job and not job.live):
            return self._finish(state)
        progress = ProgressReader.at_end(Path(self.workspace))
        if job is None:
            asyncio.run(self._submit(submission_id, context))
        self.log.info("%s Ray job %s", "attached to" if job else "submitted", submission_id)
        RayJobLink().show(self, context, RayJobLink.address(submission_id))
        raise TaskDeferred(
            trigger=RayJobTrigger(
                submission_id, self.workspace, str(state.path), progress.offset, self.poll_seconds
            ),
            method_name="resume",
        )

    def resume(self, context: "Context", event: dict[str, Any]) -> Any:
        """Go on after the job's end."""
        state = self._open_state(context)
        self._submission_id = event["submission_id"]
        RayJobLink().show(self, context, RayJobLink.address(event["submission_id"]))
        if event["status"] != "SUCCEEDED":
            raise self._failure(event)
        if not self.has_result():
            raise RuntimeError(f"Ray job {event['submission_id']} left no valid record")
        return self._finish(state)

    def skip(self) -> bool:
        """Whether there is no need for a job; asked before one is submitted."""
        return False

    def has_result(self) -> bool:
        """Whether a succeeded job left a valid result."""
        return True

    def finish(self) -> Any:
        """Called once the result is there; gives the task's return value."""
        return None

    def on_kill(self) -> None:
        """Stop the job when a person kills the task while it is not deferred, and the task too.

        Airflow calls this in a signal handler, perhaps inside a running event loop, and goes on
        with `execute` where it returns.
        """
        if self._state:
            self._state.close()
        if self._submission_id:
            stopping = Thread(target=asyncio.run, args=(stop_job(self._submission_id),))
            stopping.start()
            stopping.join()
        raise AirflowTaskTerminated("killed by a person")

    async def _walk(self, key: str) -> tuple[str, Job | None]:
        """The id to use, and the job by that id where it is live or succeeded."""
        n = 0
        async with jobs_api() as jobs:
            while True:
                self._submission_id = submission_id = f"penstock-{key}-{n}"
                job = await jobs.get(submission_id)
                if job is None or job.live or (job.status == "SUCCEEDED" and self.has_result()):
                    return submission_id, job
                n += 1

    async def _submit(self, submission_id: str, context: "Context") -> None:
        ti = context["ti"]
        metadata = {"dag_id": ti.dag_id, "dag_run_id": ti.run_id, "task_id": ti.task_id}
        entrypoint, variables = job_command(Path(self.workspace), self.entrypoint)
        async with jobs_api() as jobs:
            await jobs.submit(
                submission_id, entrypoint, {**variables, RAY_JOB_VARIABLE: submission_id}, metadata
            )

    def _open_state(self, context: "Context") -> JobState:
        map_index = context["ti"].map_index
        self._state = JobState.of(
            Path(self.workspace), self.task_id, -1 if map_index is None else map_index
        )
        return self._state

    def _finish(self, state: JobState) -> Any:
        result = self.finish()
        state.close()
        return result

    def _failure(self, event: dict[str, Any]) -> Exception:
        if message := user_error(Path(self.workspace), self.task_id):
            return AirflowFailException(message)
        if event.get("message"):
            self.log.error("%s", event["message"])
        return RuntimeError(f"Ray job {event['submission_id']} ended as {event['status']}")


class RayJobTrigger(BaseTrigger):
    """Waits for a Ray job in the triggerer and writes its progress into the task's log.

    Args:
        submission_id: the job.
        workspace: the folder whose `progress.jsonl` is followed.
        state_path: the task's `JobState`.
        offset: where in the progress file the job's lines begin, in bytes.
        poll_seconds: between two looks.
    """

    def __init__(
        self,
        submission_id: str,
        workspace: str,
        state_path: str,
        offset: int,
        poll_seconds: float,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.submission_id = submission_id
        self.workspace = workspace
        self.state_path = state_path
        self.offset = offset
        self.poll_seconds = poll_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """How the triggerer makes this trigger again."""
        names = ("submission_id", "workspace", "state_path", "offset", "poll_seconds")
        arguments = {name: getattr(self, name) for name in names}
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event when the job is over, or when its cluster is gone."""
        progress = ProgressReader(Path(self.workspace), self.offset)
        answered = time.monotonic()
        while True:
            for event in await asyncio.to_thread(lambda: list(progress.read())):
                self.log.info("%s", event.line())
            try:
                async with jobs_api() as jobs:
                    job = await jobs.get(self.submission_id)
            except (httpx.HTTPError, OSError, ValueError) as error:
                if time.monotonic() - answered > _UNREACHABLE_S:
                    yield self._event("UNREACHABLE", f"Ray did not answer: {error}")
                    return
            else:
                answered = time.monotonic()
                if job is None or not job.live:
                    yield self._event(job.status if job else "LOST", job.message if job else None)
                    return
            await asyncio.sleep(self.poll_seconds)

    async def on_kill(self) -> None:
        """Stop the job when a person clears or marks the deferred task."""
        JobState(Path(self.state_path)).close()
        await stop_job(self.submission_id)

    def _event(self, status: str, message: str | None) -> TriggerEvent:
        return TriggerEvent(
            {"submission_id": self.submission_id, "status": status, "message": message}
        )


def job_command(workspace: Path, entrypoint: str) -> tuple[str, dict[str, str]]:
    """The shell command and the environment variables of a job that runs in a workspace."""
    return f"cd {shlex.quote(str(workspace))} && {entrypoint}", stage_variables(workspace)


async def stop_job(submission_id: str) -> None:
    """Ask Ray to end a job."""
    async with jobs_api() as jobs:
        await jobs.stop(submission_id)


def _job_key(context: "Context", generation: int) -> str:
    ti = context["ti"]
    parts = (ti.dag_id, ti.run_id, ti.task_id, ti.map_index, generation)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
