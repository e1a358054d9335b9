"""Wait in the triggerer for a Ray job's end and log its progress, without a worker slot.

If the job ended without its result, tell the reason from what Ray says about it.
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

LOST = "LOST"  # the cluster does not know the job, so it is another cluster now
UNREACHABLE = "UNREACHABLE"
RETURN_VALUE = "return_value"  # Airflow's key of a task's return value
_WARN_EVERY_S = 60.0
_SHORTEST_PAUSE_S, _PAUSE_SHARE = 0.1, 0.02  # between two checks, and of a job's time so far
_TELL_SHARE = 0.02  # of a job's time so far: the pause between two lines of progress ...
_TELL_EVERY_S = 60.0  # ... but at most this long


class RayJobTrigger(BaseTrigger):
    """Fires once: when the job is over, or when its cluster is gone or silent for too long.

    A successful job ends the task, unless `calls_back`; the operator handles every other event. A
    restart of the triggerer starts the trigger again and does not affect the job.

    Args:
        submission_id: The job's id.
        workspace: The folder whose `progress.jsonl` is followed.
        state_path: The file of the task's `JobState`.
        offset: The byte of the progress file at which the job's lines begin.
        poll_seconds: The longest time between two checks; of a short job it is less.
        patience_seconds: How long Ray may not answer before the trigger fires.
        result: The file of the workspace that a successful job has left.
        returns: The task's return value after a successful job.
        calls_back: Whether the operator handles a success, too: Airflow tells its listeners of a
            task's end only where the task's own process ends it.
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
        calls_back: bool = False,
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
        self.calls_back = calls_back

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class and arguments with which the triggerer creates this trigger again."""
        arguments = {
            "submission_id": self.submission_id,
            "workspace": self.workspace,
            "state_path": self.state_path,
            "offset": self.offset,
            "poll_seconds": self.poll_seconds,
            "patience_seconds": self.patience_seconds,
            "result": self.result,
            "returns": self.returns,
            "calls_back": self.calls_back,
        }
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event: success, or the job's `Job.model_dump`, perhaps LOST or UNREACHABLE."""
        workspace, stage = Path(self.workspace), Path(self.state_path).stem
        process = TriggererProcess(Path(self.state_path), self.submission_id)
        progress = ProgressReader(workspace, self.offset)
        if await asyncio.to_thread(process.arrive, workspace, stage):
            progress = ProgressReader.at_end(workspace)  # the log has the earlier lines
            self.log.info("the triggerer was replaced; %s continues", self.submission_id)
        job = await self._follow(progress)
        process.leave()
        succeeded = job.status == "SUCCEEDED" and has_result(self.workspace, self.result)
        if succeeded:
            self.log.info("Ray job %s succeeded", self.submission_id)
        if succeeded and not self.calls_back:
            yield TaskSuccessEvent(xcoms={RETURN_VALUE: self.returns})
        else:
            yield TriggerEvent(job.model_dump(exclude={"metadata"}))

    async def on_kill(self) -> None:
        """Stop the job if a user has cleared or marked the deferred task."""
        ti = self.task_instance
        if ti is not None and await asyncio.to_thread(state_of, ti) in (DEFERRED, UNKNOWN):
            self.log.info("%s continues: its task still waits for it", self.submission_id)
            return
        JobState(Path(self.state_path)).close(self.submission_id)
        TriggererProcess(Path(self.state_path), self.submission_id).leave()
        await stop_job(self.submission_id, Path(self.workspace))

    async def _follow(self, progress: ProgressReader) -> Job:
        """Wait until the job is over and return it."""
        began = time.monotonic()
        log, silence = _Thinned(), _Silence(self.patience_seconds)
        # Use one client for the whole time, because opening it loads the trusted CAs.
        async with jobs_api(Path(self.workspace)) as jobs:
            while True:
                try:
                    events = await asyncio.to_thread(lambda: list(progress.read()))
                    job = await jobs.get(self.submission_id) or self._job(LOST)
                    silence.ended()
                except (httpx.HTTPError, OSError, ValueError) as error:
                    if silence.too_long():
                        return self._job(UNREACHABLE, f"Ray did not answer: {error}")
                    if silence.to_be_told():
                        self.log.warning(
                            "Ray did not answer about %s: %r", self.submission_id, error
                        )
                else:
                    if line := log.line(events, last=not job.live):
                        self.log.info("%s", line)
                    if not job.live:
                        return job
                await asyncio.sleep(self._pause(time.monotonic() - began))

    def _pause(self, followed: float) -> float:
        """Return the seconds until the next check: the end of a short job is seen sooner."""
        return min(self.poll_seconds, _SHORTEST_PAUSE_S + _PAUSE_SHARE * followed)

    def _job(self, status: str, message: str | None = None) -> Job:
        return Job(submission_id=self.submission_id, status=status, message=message)


def has_result(workspace: str, result: str | None) -> bool:
    """Return whether the job's last file exists, or no such file is required."""
    return result is None or Path(workspace, result).is_file()


class _Thinned:
    """A filter of progress lines for the log: the longer a job lasts, the fewer are logged."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told = float("-inf")
        self._waiting: Progress | None = None

    def line(self, events: list[Progress], *, last: bool) -> str | None:
        """Return the newest line if it is time to log one."""
        self._waiting = events[-1] if events else self._waiting
        now = time.monotonic()
        pause = min((now - self._began) * _TELL_SHARE, _TELL_EVERY_S)
        due = now - self._told >= pause
        if self._waiting is None or not (due or last):
            return None
        line, self._waiting, self._told = self._waiting.line(), None, now
        return line


class _Silence:
    """The time for which Ray has not answered."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.ended()

    def ended(self) -> None:
        """Begin again, because Ray answered."""
        self._since = self._warned = time.monotonic()

    def too_long(self) -> bool:
        """Return whether Ray has not answered for too long."""
        return time.monotonic() - self._since > self._patience

    def to_be_told(self) -> bool:
        """Return whether it is time for a warning."""
        due = time.monotonic() - self._warned > _WARN_EVERY_S
        if due:
            self._warned = time.monotonic()
        return due


# Ray's error of a node, by its name and by its text; a device's is the stage's user error.
_OUT_OF_MEMORY = ("OutOfMemoryError", "the node running low on memory")
_NODE_DIED = "node has died"
_COMMAND_FAILED = "JOB_ENTRYPOINT_COMMAND_ERROR"  # any other type: its runner failed


class Failure(NamedTuple):
    """What happened to a job, for the logbook and for the task's one-line error."""

    kind: Kind
    cause: str


def failure_of(job: Job) -> Failure:
    """Return the reason why a job that is over ended."""
    name, message = f"Ray job {job.submission_id}", job.message or ""
    if job.status == LOST:
        return Failure("cluster lost", f"the Ray cluster of {name} is gone")
    if job.status == "STOPPED":
        return Failure("human decision", f"{name} was stopped, but not by Airflow")
    if job.status == "SUCCEEDED":
        return Failure("failure", f"{name} succeeded, but left no valid record")
    if any(sign in message for sign in _OUT_OF_MEMORY):
        return Failure(
            "out of memory",
            f"{name}: a node ran out of memory; give it more, or use a smaller "
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
    """Return the signal that ended a command: a shell adds 128, Python negates it."""
    if code is None:
        return None
    number = -code if code < 0 else code - 128
    return signal.Signals(number) if number in signal.valid_signals() else None
