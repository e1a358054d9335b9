"""The operator and its trigger against the platform's Ray, without a scheduler between."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowTaskTerminated, TaskDeferred

from pipelines.orchestration.ray_job import RayJobOperator, jobs_api


class Task(RayJobOperator):
    """A job whose result is a file."""

    def has_result(self) -> bool:
        return (self.results / "result").exists()

    def finish(self):
        return "finished"


@pytest.fixture
def make(platform_variables, tmp_path):
    """A new operator object for the same task instance, as each process of Airflow has."""

    def one(entrypoint: str) -> Task:
        task = Task(task_id="job", entrypoint=entrypoint, workspace=str(tmp_path), poll_seconds=0.2)
        task.results = tmp_path
        return task

    return one


@pytest.fixture
def context(request):
    ti = SimpleNamespace(
        dag_id="test",
        run_id=request.node.name,
        task_id="job",
        map_index=-1,
        xcom_push=lambda **_: 0,
    )
    return {"ti": ti}


def submit(task: Task, context) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context)
    return deferred.value


def wait(deferred: TaskDeferred) -> dict:
    async def first():
        return await anext(deferred.trigger.run())

    return asyncio.run(asyncio.wait_for(first(), 60)).payload


def status(submission_id: str) -> str:
    async def ask():
        async with jobs_api() as jobs:
            return (await jobs.get(submission_id)).status

    return asyncio.run(ask())


def wait_for_stop(submission_id: str) -> None:
    deadline = time.monotonic() + 15
    while status(submission_id) != "STOPPED":
        assert time.monotonic() < deadline, "the job lives 15 s after it was to be stopped"
        time.sleep(0.2)


def test_a_second_process_attaches_and_a_clear_makes_a_new_job(make, context):
    first = submit(make("sleep 2; touch result"), context)
    second = submit(make("never run"), context)
    assert second.trigger.submission_id == first.trigger.submission_id

    event = wait(first)
    assert event["status"] == "SUCCEEDED"
    # Airflow dies before the task is recorded as done: the job is found and not run again.
    assert make("never run").execute(context) == "finished"
    assert make("never run").resume(context, event) == "finished"

    cleared = submit(make("true"), context)
    assert cleared.trigger.submission_id != first.trigger.submission_id


def test_a_failed_job_is_followed_by_the_next_number(make, context):
    first = submit(make("exit 7"), context)
    event = wait(first)
    assert event["status"] == "FAILED"
    with pytest.raises(RuntimeError, match="ended as FAILED"):
        make("exit 7").resume(context, event)
    second = submit(make("touch result"), context)
    assert second.trigger.submission_id == first.trigger.submission_id.removesuffix("0") + "1"


def test_a_job_that_succeeds_without_a_result_is_no_success(make, context):
    event = wait(submit(make("true"), context))
    with pytest.raises(RuntimeError, match="no valid record"):
        make("true").resume(context, event)


def test_a_persons_error_is_their_line_and_is_not_retried(make, context):
    line = '{"stage": "job", "message": "x.txt: mend it"}'
    event = wait(submit(make(f"echo '{line}' > error.json; exit 2"), context))
    with pytest.raises(AirflowFailException, match=r"^x\.txt: mend it$"):
        make("true").resume(context, event)


def test_progress_is_logged_from_the_jobs_first_line(make, context, tmp_path, caplog, capsys):
    old = '{"stage": "job", "done": 1, "unit": "old"}\n'
    (tmp_path / "progress.jsonl").write_text(old)
    new = '{"stage": "job", "done": 2, "unit": "new"}'
    deferred = submit(make(f"echo '{new}' >> progress.jsonl; touch result; sleep 1"), context)
    with caplog.at_level("INFO"):
        wait(deferred)
    logged = caplog.text + capsys.readouterr().out  # to where depends on what Airflow has set up
    assert "job 2 new" in logged
    assert "job 1 old" not in logged


def test_killing_a_deferred_task_stops_its_job_and_a_clear_does_not_attach_to_it(make, context):
    deferred = submit(make("sleep 100"), context)
    while status(deferred.trigger.submission_id) == "PENDING":
        time.sleep(0.2)
    asyncio.run(deferred.trigger.on_kill())
    again = submit(make("true"), context)
    assert again.trigger.submission_id != deferred.trigger.submission_id
    wait_for_stop(deferred.trigger.submission_id)


def test_killing_a_task_in_a_worker_stops_its_job_and_the_task(make, context):
    task = make("sleep 100")
    submission_id = submit(task, context).trigger.submission_id
    while status(submission_id) == "PENDING":
        time.sleep(0.2)
    with pytest.raises(AirflowTaskTerminated):
        task.on_kill()
    wait_for_stop(submission_id)
