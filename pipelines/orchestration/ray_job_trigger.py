"""Waits in the triggerer for a Ray job's end and tells of its progress, without a worker slot.

Why a Ray job ended without its result, told apart by what Ray says of it.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from airflow.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent

from pipelines.orchestration.job_state import JobState
from pipelines.orchestration.jobs_api import Job, jobs_api, stop_job
from pipelines.orchestration.task_liveness import DEFERRED, UNKNOWN, TriggererProcess, state_of
from pipelines.run.logbook import Kind
from pipelines.run.progress import Progress, ProgressReader

LOST = "LOST"  # the cluster answers and knows no such job: it is another cluster now
UNREACHABLE = "UNREACHABLE"
RETURN_VALUE = "return_value"  # Airflow's key of it
_WARN_EVERY_S = 60.0
_TELL_SHARE = 0.02  # of a job's time until now: the pause between two lines of its progress ...
_TELL_EVERY_S = 60.0  # ... which is no longer than this


class RayJobTrigger(BaseTrigger):
    """Fires once: when the job is over, or when its cluster is gone or silent for too long.

    A job that succeeded ends the task; what else there is, the operator judges. A restart of the
    triggerer starts it anew and does nothing to the job.

    Args:
        submission_id: the job.
        workspace: the folder whose `progress.jsonl` is followed.
        state_path: the task's `JobState`.
        offset: where in the progress file the job's lines begin, in bytes.
        poll_seconds: between two looks.
        patience_seconds: without an answer from Ray until that is an event.
        result: the file of the workspace that a job that succeeded has left.
        returns: the task's return value then.
    """

    def __init__(
        self,
        submission_id: str,
        workspace: str,
        state_path: str,
        offset: int,
        poll_seconds: float,
        patience_seconds: float,
        result: str | None = None,
        returns: Any = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.submission_id = submission_id
        self.workspace = workspace
        self.state_path = state_path
        self.offset = offset
        self.poll_seconds = poll_seconds
        self.patience_seconds = patience_seconds
        self.result = result
        self.returns = returns

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """How the triggerer makes this trigger again."""
        arguments = {
            "submission_id": self.submission_id,
            "workspace": self.workspace,
            "state_path": self.state_path,
            "offset": self.offset,
            "poll_seconds": self.poll_seconds,
            "patience_seconds": self.patience_seconds,
            "result": self.result,
            "returns": self.returns,
        }
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event: success, or the job as `Job.model_dump` has it, LOST or UNREACHABLE."""
        workspace, stage = Path(self.workspace), Path(self.state_path).stem
        presence = TriggererProcess(Path(self.state_path), self.submission_id)
        progress = ProgressReader(workspace, self.offset)
        if await asyncio.to_thread(presence.arrive, workspace, stage):
            progress = ProgressReader.at_end(workspace)  # the log has what was before
            self.log.info("the triggerer was replaced; %s goes on", self.submission_id)
        job = await self._follow(progress)
        presence.leave()
        if job.status == "SUCCEEDED" and has_result(self.workspace, self.result):
            self.log.info("Ray job %s succeeded", self.submission_id)
            yield TaskSuccessEvent(xcoms={RETURN_VALUE: self.returns})
        else:
            yield TriggerEvent(job.model_dump(exclude={"metadata"}))

    async def on_kill(self) -> None:
        """Stop the job where a user has cleared or marked the deferred task."""
        ti = self.task_instance
        if ti is not None and await asyncio.to_thread(state_of, ti) in (DEFERRED, UNKNOWN):
            self.log.info("%s goes on: its task still waits for it", self.submission_id)
            return
        JobState(Path(self.state_path)).close(self.submission_id)
        TriggererProcess(Path(self.state_path), self.submission_id).leave()
        await stop_job(self.submission_id, Path(self.workspace))

    async def _follow(self, progress: ProgressReader) -> Job:
        """The job once it is over."""
        log, silence = _Thinned(), _Silence(self.patience_seconds)
        # One for the whole time: opening it loads the trusted CAs.
        async with jobs_api(Path(self.workspace)) as jobs:
            while True:
                try:
                    events = await asyncio.to_thread(lambda: list(progress.read()))
                    job = await jobs.get(self.submission_id) or self._job(LOST)
                    silence.ended()
                except (httpx.HTTPError, OSError, ValueError) as error:
                    if silence.too_long():
                        return self._job(UNREACHABLE, f"Ray gave no answer: {error}")
                    if silence.to_be_told():
                        self.log.warning("no answer about %s: %r", self.submission_id, error)
                else:
                    if line := log.line(events, last=not job.live):
                        self.log.info("%s", line)
                    if not job.live:
                        return job
                await asyncio.sleep(self.poll_seconds)

    def _job(self, status: str, message: str | None = None) -> Job:
        return Job(submission_id=self.submission_id, status=status, message=message)


def has_result(workspace: str, result: str | None) -> bool:
    """Whether the file is there that a job leaves last, where one is asked for."""
    return result is None or Path(workspace, result).is_file()


class _Thinned:
    """Which lines of progress go to the log: fewer, the longer a job lasts."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told = float("-inf")
        self._waiting: Progress | None = None

    def line(self, events: list[Progress], *, last: bool) -> str | None:
        """The newest, where it is time for one."""
        self._waiting = events[-1] if events else self._waiting
        now = time.monotonic()
        pause = min((now - self._began) * _TELL_SHARE, _TELL_EVERY_S)
        due = now - self._told >= pause
        if self._waiting is None or not (due or last):
            return None
        line, self._waiting, self._told = self._waiting.line(), None, now
        return line


class _Silence:
    """How long Ray has not answered."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.ended()

    def ended(self) -> None:
        """Ray answered."""
        self._since = self._warned = time.monotonic()

    def too_long(self) -> bool:
        """Whether patience is at its end."""
        return time.monotonic() - self._since > self._patience

    def to_be_told(self) -> bool:
        """Whether it is time for a warning."""
        due = time.monotonic() - self._warned > _WARN_EVERY_S
        if due:
            self._warned = time.monotonic()
        return due


_OUT_OF_MEMORY = "OutOfMemoryError"  # Ray's, of a node; a device's is a user's error of the stage
_NODE_DIED = "node has died"
_COMMAND_FAILED = "JOB_ENTRYPOINT_COMMAND_ERROR"  # all else that Ray names befell what runs it


class Failure(NamedTuple):
    """What befell a job, for the logbook and the task's one line."""

    kind: Kind
    cause: str


def failure_of(job: Job) -> Failure:
    """What ended a job that is over."""
    name, message = f"Ray job {job.submission_id}", job.message or ""
    if job.status == LOST:
        return Failure("cluster lost", f"the Ray cluster of {name} is gone")
    if job.status == "STOPPED":
        return Failure("human decision", f"{name} was stopped, but not by Airflow")
    if job.status == "SUCCEEDED":
        return Failure("failure", f"{name} succeeded, but left no valid record")
    if _OUT_OF_MEMORY in message:
        return Failure(
            "out of memory",
            f"{name}: a node ran out of memory; give it more, or take a smaller "
            "train.micro_batch_size, more processes in parallel, or auto for both",
        )
    if killed_by := _signal(job.driver_exit_code):
        kind: Kind = "preemption" if killed_by == signal.SIGTERM else "driver lost"
        return Failure(kind, f"the driver of {name} was ended by {killed_by.name}")
    if job.error_type not in (None, _COMMAND_FAILED):
        kind = "node lost" if _NODE_DIED in message else "driver lost"
        return Failure(kind, f"{name}: {message.partition(chr(10))[0]}")
    return Failure("failure", f"{name} failed with exit code {job.driver_exit_code}; see its log")


def _signal(code: int | None) -> signal.Signals | None:
    """The signal that ended a command; a shell says 128 more, Python minus."""
    if code is None:
        return None
    number = -code if code < 0 else code - 128
    return signal.Signals(number) if number in signal.valid_signals() else None
