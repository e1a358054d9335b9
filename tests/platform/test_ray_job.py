"""The operator and its trigger against the platform's Ray, without a scheduler between."""

import asyncio
import json
import os
import signal
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import psutil
import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.triggers.base import TaskSuccessEvent, TriggerEvent

from pipelines.orchestration import ray_job
from pipelines.orchestration.jobs_api import jobs_api
from pipelines.orchestration.ray_job import RayJobOperator, TaskKilledError
from pipelines.run.logbook import read_logbook
from pipelines.stages.stage_process import RAY_JOB_VARIABLE


@pytest.fixture
def make(platform_variables, tmp_path, monkeypatch):
    """A new operator object for the same task instance, as each process of Airflow has."""
    # Airflow knows no such runs: jobs of this home would be orphans to the platform's reconciler.
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))

    def one(entrypoint: str, **more) -> RayJobOperator:
        return RayJobOperator(
            task_id="job",
            entrypoint=entrypoint,
            workspace=str(tmp_path),
            result="result",
            returns="finished",
            poll_seconds=0.2,
            **more,
        )

    return one


@pytest.fixture
def context(request):
    ti = SimpleNamespace(
        dag_id="test",
        run_id=request.node.name,
        task_id="job",
        map_index=-1,
        try_number=1,
        max_tries=3,
        start_date=datetime.now(UTC),
        xcom_push=lambda **_: 0,
    )
    return {"ti": ti}


def submit(task: RayJobOperator, context) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context)
    return deferred.value


def wait(deferred: TaskDeferred) -> TriggerEvent:
    async def first():
        return await anext(deferred.trigger.run())

    return asyncio.run(asyncio.wait_for(first(), 60))


def status(submission_id: str) -> str:
    async def ask():
        async with jobs_api() as jobs:
            return (await jobs.get(submission_id)).status

    return asyncio.run(ask())


def processes_of_job(submission_id: str) -> list[psutil.Process]:
    """All that work for a job: its driver and what Ray started for it."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RAY_JOB_VARIABLE) == submission_id:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for_life(submission_id: str) -> None:
    while status(submission_id) == "PENDING" or not processes_of_job(submission_id):
        time.sleep(0.2)


def wait_for_stop(submission_id: str) -> None:
    deadline = time.monotonic() + 15
    while status(submission_id) != "STOPPED" or processes_of_job(submission_id):
        assert time.monotonic() < deadline, "the job lives 15 s after it was to be stopped"
        time.sleep(0.2)


def test_a_second_process_attaches_and_a_clear_makes_a_new_job(make, context):
    first = submit(make("sleep 2; touch result"), context)
    second = submit(make("never run"), context)
    assert second.trigger.submission_id == first.trigger.submission_id

    assert wait(first) == TaskSuccessEvent(xcoms={"return_value": "finished"})
    # Airflow dies before the task is recorded as done: the job is found and not run again.
    assert make("never run").execute(context) == "finished"

    context["ti"].max_tries += 1
    cleared = submit(make("true"), context)
    assert cleared.trigger.submission_id != first.trigger.submission_id


def test_a_failed_job_is_followed_by_the_next_number(make, context):
    first = submit(make("exit 7"), context)
    event = wait(first).payload
    assert event["status"] == "FAILED"
    with pytest.raises(RuntimeError, match="failed with exit code 7"):
        make("exit 7").resume(context, event)
    second = submit(make("touch result"), context)
    assert second.trigger.submission_id == first.trigger.submission_id.removesuffix("0") + "1"


def test_a_job_that_succeeds_without_a_result_is_no_success(make, context):
    event = wait(submit(make("true"), context)).payload
    with pytest.raises(RuntimeError, match="no valid record"):
        make("true").resume(context, event)


def test_a_users_error_is_their_line_and_is_not_retried(make, context):
    line = '{"stage": "job", "message": "x.txt: fix it"}'
    event = wait(submit(make(f"echo '{line}' > error.json; exit 2"), context)).payload
    with pytest.raises(AirflowFailException, match=r"^x\.txt: fix it$"):
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


def test_a_driver_that_is_killed_behind_progress_is_followed_in_the_same_try(
    make, context, tmp_path
):
    line = '{"stage": "job", "done": 7, "total": 9, "unit": "steps"}'
    deferred = submit(make(f"echo '{line}' >> progress.jsonl; sleep 100"), context)
    first = deferred.trigger.submission_id
    wait_for_life(first)
    while not (tmp_path / "progress.jsonl").exists():
        time.sleep(0.1)
    driver = next(p for p in processes_of_job(first) if p.cmdline() == ["sleep", "100"])
    os.killpg(os.getpgid(driver.pid), signal.SIGKILL)
    event = wait(deferred).payload
    with pytest.raises(TaskDeferred) as again:
        make("touch result").resume(context, event)
    assert again.value.trigger.submission_id == first.removesuffix("0") + "1"
    (entry,) = read_logbook(tmp_path)
    assert (entry.kind, entry.step) == ("driver lost", 7)


def test_killing_a_deferred_task_stops_its_job_and_a_clear_does_not_attach_to_it(make, context):
    deferred = submit(make("sleep 100"), context)
    wait_for_life(deferred.trigger.submission_id)
    asyncio.run(deferred.trigger.on_kill())
    wait_for_stop(deferred.trigger.submission_id)
    again = submit(make("true"), context)
    assert again.trigger.submission_id != deferred.trigger.submission_id


def test_killing_a_task_in_a_worker_stops_its_job_and_the_task(make, context, monkeypatch):
    said = {context["ti"].run_id: {"job": "failed"}}
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(lambda **_: said))
    deferred = submit(make("sleep 100"), context)
    wait_for_life(deferred.trigger.submission_id)
    task = make("sleep 100")
    # The signal comes while the task looks at the result.
    monkeypatch.setattr(ray_job, "has_result", lambda *_: task.on_kill())
    event = {"submission_id": deferred.trigger.submission_id, "status": "SUCCEEDED"}
    with pytest.raises(TaskKilledError):
        task.resume(context, event)
    wait_for_stop(deferred.trigger.submission_id)


PROBE = """
import json, sys
from pathlib import Path

import ray
from shipped import code

@ray.remote
def where():
    from shipped import code
    return code.__file__

ray.init()
seen = {"driver": code.__file__, "worker": ray.get(where.remote()), "folder": str(Path.cwd())}
Path("seen.json").write_text(json.dumps(seen))
Path("result").touch()
"""


def test_shipped_code_runs_from_the_nodes_disk_in_driver_and_workers(make, context, tmp_path):
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "__init__.py").touch()
    (tmp_path / "shipped" / "code.py").touch()
    (tmp_path / "shipped" / "main.py").write_text(PROBE)
    event = wait(submit(make("python -m shipped.main", ship=("shipped",)), context))
    assert isinstance(event, TaskSuccessEvent), event.payload["message"]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["folder"] == str(tmp_path)
    assert "/_ray_pkg_" in seen["driver"]
    assert "/_ray_pkg_" in seen["worker"]
