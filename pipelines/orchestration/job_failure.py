"""Why a Ray job ended without its result, told apart by what Ray says of it."""

import signal
from typing import NamedTuple

from pipelines.core.logbook import Kind
from pipelines.orchestration.jobs_api import Job
from pipelines.orchestration.ray_job_trigger import LOST

_OUT_OF_MEMORY = "OutOfMemoryError"  # Ray's, of a node; a device's is a person's error of the stage
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
