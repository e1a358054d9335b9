"""A Ray job as an Airflow task: submitted once, reattached, followed and cancelled.

The submission id is `penstock-<hash(dag, run, task, map index, generation)>-<n>`. A task walks
n = 0, 1, …: absent → submit; pending or running → attach; succeeded with a valid result → done;
failed or stopped → the next n. Ray refuses a known id, so two walkers can't make two jobs.
"""

import asyncio
import hashlib
import shlex
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from airflow.sdk import BaseOperator, BaseOperatorLink
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred
from airflow.triggers.base import BaseTrigger, TriggerEvent

from pipelines.core.progress import ProgressReader
from pipelines.core.settings import load_settings
from pipelines.core.storage import read_json, write_json
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

_UNREACHABLE_FOR = 60.0  # seconds without an answer from Ray until its cluster counts as gone


def jobs_api() -> JobsApi:
    """The Jobs API of the settings' Ray cluster."""
    settings = load_settings()
    return JobsApi(settings.ray_url, settings.ray_token_path)


class RayJobOperator(BaseOperator):
    """Runs a command as a Ray job and defers, so that it holds no worker slot.

    Args:
        entrypoint: the shell command, run in the workspace with its code first on PYTHONPATH.
        workspace: a folder that Airflow and Ray share; the job's progress is read from its
            `progress.jsonl`, and `jobs/<task_id>.json` in it keeps the generation.
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

    def execute(self, context: "Context") -> Any:
        """Attach to the task's job, or submit it, and defer until it ends."""
        submission_id, job = asyncio.run(self._walk(self._job_key(context)))
        if job is None and self.skip():
            return self.finish()
        if job and not job.live:
            self.log.info("Ray job %s had succeeded already", submission_id)
            return self.finish()
        if job is None:
            forget_error(Path(self.workspace))
            asyncio.run(self._submit(submission_id, context))
        self.log.info("%s Ray job %s", "attached to" if job else "submitted", submission_id)
        RayJobLink().show(self, context, RayJobLink.address(submission_id))
        raise TaskDeferred(
            trigger=RayJobTrigger(submission_id, self.workspace, self.poll_seconds),
            method_name="resume",
        )

    def resume(self, context: "Context", event: dict[str, Any]) -> Any:
        """Go on after the job's end."""
        self._submission_id = event["submission_id"]
        RayJobLink().show(self, context, RayJobLink.address(event["submission_id"]))
        if event["status"] == "SUCCEEDED":
            if not self.has_result():
                raise RuntimeError(f"Ray job {event['submission_id']} left no valid record")
            return self.finish()
        raise self._failure(event)

    def skip(self) -> bool:
        """Whether there is no need for a job; asked before one is submitted."""
        return False

    def has_result(self) -> bool:
        """Whether a succeeded job left a valid result."""
        return True

    def finish(self) -> Any:
        """Called once the result is there; a later Clear of the task makes a new job."""
        state = self._read_state()
        write_json(self._state_path(), {**state, "finished": True})
        return None

    def on_kill(self) -> None:
        """Stop the job when a person kills the task while it is not deferred."""
        if self._submission_id:
            asyncio.run(stop_job(self._submission_id))

    async def _walk(self, key: str) -> tuple[str, Job | None]:
        """The id to use, and the job by that id where it is live or succeeded."""
        async with jobs_api() as jobs:
            for n in range(1_000_000):
                submission_id = f"penstock-{key}-{n}"
                job = await jobs.get(submission_id)
                if job is None or job.live or (job.status == "SUCCEEDED" and self.has_result()):
                    self._submission_id = submission_id
                    return submission_id, job
        raise AssertionError("unreachable")

    async def _submit(self, submission_id: str, context: "Context") -> None:
        ti = context["ti"]
        metadata = {"dag_id": ti.dag_id, "dag_run_id": ti.run_id, "task_id": ti.task_id}
        entrypoint, variables = job_command(Path(self.workspace), self.entrypoint)
        async with jobs_api() as jobs:
            await jobs.submit(
                submission_id, entrypoint, {**variables, RAY_JOB_VARIABLE: submission_id}, metadata
            )

    def _job_key(self, context: "Context") -> str:
        state = self._read_state()
        if state["finished"]:  # only a person's Clear runs a finished task again
            state = {"generation": state["generation"] + 1, "finished": False}
        write_json(self._state_path(), state)
        ti = context["ti"]
        parts = (ti.dag_id, ti.run_id, ti.task_id, ti.map_index, state["generation"])
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]

    def _state_path(self) -> Path:
        return Path(self.workspace) / "jobs" / f"{self.task_id}.json"

    def _read_state(self) -> dict[str, Any]:
        path = self._state_path()
        return read_json(path) if path.exists() else {"generation": 0, "finished": False}

    def _failure(self, event: dict[str, Any]) -> Exception:
        if message := user_error(Path(self.workspace)):
            return AirflowFailException(message)
        if event.get("message"):
            self.log.error("%s", event["message"])
        return RuntimeError(f"Ray job {event['submission_id']} ended as {event['status']}")


class RayJobTrigger(BaseTrigger):
    """Waits for a Ray job in the triggerer and writes its progress into the task's log."""

    def __init__(self, submission_id: str, workspace: str, poll_seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.submission_id = submission_id
        self.workspace = workspace
        self.poll_seconds = poll_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """How the triggerer makes this trigger again."""
        arguments = {
            "submission_id": self.submission_id,
            "workspace": self.workspace,
            "poll_seconds": self.poll_seconds,
        }
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event when the job is over, or when its cluster is gone."""
        progress = ProgressReader(Path(self.workspace), skip_old=True)
        unreachable = 0.0
        while True:
            for event in await asyncio.to_thread(lambda: list(progress.read())):
                self.log.info("%s", event.line())
            try:
                async with jobs_api() as jobs:
                    job = await jobs.get(self.submission_id)
                unreachable = 0.0
            except httpx.HTTPError as error:
                unreachable += self.poll_seconds
                if unreachable >= _UNREACHABLE_FOR:
                    yield self._event("UNREACHABLE", f"Ray did not answer: {error}")
                    return
            else:
                if job is None or not job.live:
                    yield self._event(job.status if job else "LOST", job.message if job else None)
                    return
            await asyncio.sleep(self.poll_seconds)

    async def on_kill(self) -> None:
        """Stop the job when a person clears or marks the deferred task."""
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
