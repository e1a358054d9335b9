"""Kinds of failure, by what Ray really says of a job."""

import pytest

from pipelines.orchestration.jobs_api import Job
from pipelines.orchestration.ray_job_trigger import failure_of

COMMAND = "JOB_ENTRYPOINT_COMMAND_ERROR"


def job(status="FAILED", **said):
    return Job(submission_id="penstock-a-0", status=status, **said)


@pytest.mark.parametrize(
    ("over", "kind", "text"),
    [
        (job("LOST"), "cluster lost", "is gone"),
        (job("STOPPED"), "human decision", "not by Airflow"),
        (job("SUCCEEDED"), "failure", "left no valid record"),
        (job(error_type=COMMAND, driver_exit_code=-9), "driver lost", "SIGKILL"),
        (job(error_type=COMMAND, driver_exit_code=137), "driver lost", "SIGKILL"),  # by a shell
        (job(error_type=COMMAND, driver_exit_code=143), "preemption", "SIGTERM"),
        (job(error_type=COMMAND, driver_exit_code=1), "failure", "exit code 1"),
        (
            job(
                error_type=COMMAND,
                driver_exit_code=1,
                message="ray.exceptions.OutOfMemoryError: Task was killed due to the node ...",
            ),
            "out of memory",
            "smaller train.micro_batch_size",
        ),
        (
            job(
                message="Unexpected error occurred: 8 worker(s) were killed due to the node "
                "running low on memory.\nMemory on the node (IP: 192.0.2.2, ID: a1) was ...",
            ),
            "out of memory",
            "a node ran out of memory",
        ),
        (
            job(
                error_type="JOB_SUPERVISOR_ACTOR_DIED",
                message="Job supervisor actor died: The actor died because its node has died.\nID",
            ),
            "node lost",
            "because its node has died",
        ),
        (
            job(error_type="JOB_SUPERVISOR_ACTOR_DIED", message="Job supervisor actor died: kill"),
            "driver lost",
            "died: kill",
        ),
    ],
)
def test_what_befell_a_job(over, kind, text):
    failure = failure_of(over)
    assert failure.kind == kind
    assert text in failure.cause
    assert "\n" not in failure.cause
    assert "penstock-a-0" in failure.cause
