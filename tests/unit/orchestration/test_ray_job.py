"""Which job a task goes on with, whatever died: Ray's side is in memory, the operator is real."""

import asyncio
import json
import shutil

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.triggers.base import BaseTaskEndEvent, TaskSuccessEvent

from pipelines.orchestration import ray_job
from pipelines.orchestration.job_state import JobState
from pipelines.orchestration.ray_job import RayJobOperator, TaskKilledError
from pipelines.orchestration.ray_job_trigger import RayJobTrigger
from pipelines.run.logbook import read_logbook
from tests.unit.orchestration.fake_ray import KILLED, FakeRay, task_instance


@pytest.fixture
def ray(monkeypatch, tmp_path):
    ray = FakeRay()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray.url)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    yield ray
    ray.stop()


@pytest.fixture
def process(ray, tmp_path):
    """One process of Airflow that works on the task: its operator object and its context."""

    def begin(*, tried=1, max_tries=3):
        task = RayJobOperator(
            task_id="train",
            entrypoint="python -m train",
            workspace=str(tmp_path),
            result="result",
            returns="finished",
            poll_seconds=0.05,
            patience_seconds=0.3,
        )
        ti = task_instance(tried, max_tries)
        return task, {"ti": ti}

    return begin


@pytest.fixture
def reach(tmp_path):
    """The job says how far it is."""

    def say(step):
        line = json.dumps({"stage": "train", "done": step, "total": 100, "unit": "steps"})
        with (tmp_path / "progress.jsonl").open("a") as file:
            file.write(line + "\n")

    return say


def deferred(process):
    """The trigger with which a process hands the task over."""
    task, context = process
    with pytest.raises(TaskDeferred) as handed_over:
        task.execute(context)
    return handed_over.value.trigger


def fired(trigger):
    async def first():
        return await anext(trigger.run())

    return asyncio.run(asyncio.wait_for(first(), 10))


def event(trigger):
    """With which the operator goes on."""
    fired_event = fired(trigger)
    assert not isinstance(fired_event, BaseTaskEndEvent)
    return fired_event.payload


def resumed(process, payload):
    """What `resume` does: the next trigger where it defers again."""
    task, context = process
    try:
        return task.resume(context, payload)
    except TaskDeferred as handed_over:
        return handed_over.trigger


def kinds(workspace):
    return [entry.kind for entry in read_logbook(workspace)]


def test_progress_is_followed_by_the_next_job_in_the_same_try_as_often_as_need_be(
    ray, process, reach, tmp_path
):
    trigger = deferred(process())
    for lost in range(5):  # more than there are retries
        reach(10 * (lost + 1))
        ray.end(trigger.submission_id, "FAILED", **KILLED)
        trigger = resumed(process(), event(trigger))
        assert trigger.submission_id.endswith(f"-{lost + 1}")
    assert kinds(tmp_path) == ["driver lost"] * 5
    assert [entry.step for entry in read_logbook(tmp_path)] == [10, 20, 30, 40, 50]


def test_no_progress_costs_a_retry_and_the_retry_takes_the_next_job(ray, process, reach, tmp_path):
    trigger = deferred(process())
    reach(10)
    ray.end(trigger.submission_id, "FAILED", **KILLED)
    trigger = resumed(process(), event(trigger))
    reach(5)  # it went on from a checkpoint and did not come as far
    ray.end(trigger.submission_id, "FAILED", **KILLED)
    with pytest.raises(RuntimeError, match="SIGKILL"):
        resumed(process(), event(trigger))
    retry = deferred(process(tried=2))
    assert retry.submission_id.endswith("-2")
    assert kinds(tmp_path) == ["driver lost"] * 2


def test_a_job_that_failed_while_airflow_was_away_is_judged_by_the_try_that_finds_it(
    ray, process, reach, tmp_path
):
    first = deferred(process())
    reach(10)
    ray.end(first.submission_id, "FAILED", **KILLED)
    assert deferred(process(tried=2)).submission_id.endswith("-1")
    assert kinds(tmp_path) == ["driver lost"]


def test_a_cluster_that_is_gone_gets_the_next_job(ray, process, reach, tmp_path):
    trigger = deferred(process())
    reach(10)
    ray.jobs.clear()
    again = resumed(process(), event(trigger))
    assert again.submission_id.endswith("-1")
    assert kinds(tmp_path) == ["cluster lost"]


def test_the_end_of_a_job_that_succeeded_is_the_end_of_the_task(ray, process, tmp_path):
    trigger = deferred(process())
    (tmp_path / "result").touch()
    ray.end(trigger.submission_id, "SUCCEEDED")
    success = fired(trigger)
    assert isinstance(success, TaskSuccessEvent)
    assert success.xcoms == {"return_value": "finished"}


def test_where_openlineage_listens_the_tasks_own_process_ends_it(
    ray, process, tmp_path, monkeypatch
):
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:9")
    handed_over = deferred(process())
    (tmp_path / "result").touch()
    ray.end(handed_over.submission_id, "SUCCEEDED")
    _, arguments = handed_over.serialize()  # as the triggerer gets it
    assert resumed(process(), event(RayJobTrigger(**arguments))) == "finished"


def test_a_job_that_succeeded_and_left_no_result_has_failed(ray, process, tmp_path):
    trigger = deferred(process())
    ray.end(trigger.submission_id, "SUCCEEDED")
    with pytest.raises(RuntimeError):
        resumed(process(), event(trigger))
    assert kinds(tmp_path) == ["failure"]


def test_a_workspace_that_was_removed_and_that_its_job_made_parts_of_anew_is_one_line(
    ray, process, tmp_path
):
    trigger = deferred(process())
    shutil.rmtree(tmp_path / "jobs")
    (tmp_path / "checkpoints").mkdir()
    ray.end(trigger.submission_id, "FAILED", **KILLED)
    with pytest.raises(AirflowFailException, match="the run's workspace was removed"):
        resumed(process(), event(trigger))
    assert len(ray.submitted) == 1


def test_a_task_that_finds_no_ray_waits_for_it_without_a_worker(ray, process):
    ray.stop()
    trigger = deferred(process())
    assert event(trigger)["status"] == "UNREACHABLE"
    ray.start()
    assert not ray.submitted
    payload = event(trigger)
    assert payload["status"] == "LOST"  # Ray answers: nobody has submitted it yet
    assert resumed(process(), payload).submission_id == trigger.submission_id
    assert len(ray.submitted) == 1


def test_silence_for_too_long_costs_a_retry_and_the_next_try_attaches(ray, process):
    trigger = deferred(process())
    ray.stop()
    payload = event(trigger)
    with pytest.raises(RuntimeError, match="did not answer"):
        resumed(process(), payload)
    ray.start()
    assert deferred(process(tried=2)).submission_id == trigger.submission_id
    assert len(ray.submitted) == 1


def test_a_process_that_dies_before_it_defers_is_told_once_and_its_job_is_found(
    ray, process, tmp_path
):
    task, context = process()
    with pytest.raises(TaskDeferred):
        task.execute(context)
    mark = tmp_path / "jobs" / "train.process.json"
    assert not mark.exists()
    mark.write_text('{"pid": 7, "host": "node", "try": 1}')  # as kill -9 leaves it
    deferred(process(tried=2))
    deferred(process(tried=2))
    assert len(ray.submitted) == 1
    (entry,) = read_logbook(tmp_path)
    assert (entry.kind, entry.stage) == ("task lost", "train")
    assert "process 7 of try 1 on node" in entry.cause


def test_a_job_whose_process_died_before_it_noted_rays_answer_is_known_of_from_then_on(
    ray, process, reach, tmp_path
):
    submitted = deferred(process()).submission_id
    state = JobState.of(tmp_path, "train", -1)
    state.update(state.read(), submitted=False)
    trigger = deferred(process(tried=2))
    assert trigger.submission_id == submitted
    reach(10)
    ray.jobs.clear()
    assert resumed(process(), event(trigger)).submission_id.endswith("-1")
    assert kinds(tmp_path) == ["cluster lost"]


def test_a_triggerer_that_was_replaced_is_told_once_and_the_job_goes_on(ray, process, tmp_path):
    trigger = deferred(process())
    mark = JobState.of(tmp_path, "train", -1).path.with_suffix(".triggerer.json")
    mark.write_text(json.dumps({"pid": 7, "host": "node", "job": trigger.submission_id}))
    (tmp_path / "result").touch()
    ray.end(trigger.submission_id, "SUCCEEDED")
    assert isinstance(fired(trigger), TaskSuccessEvent)
    assert not mark.exists()
    (entry,) = read_logbook(tmp_path)
    assert (entry.kind, entry.key) == ("service lost", "triggerer-7")


def test_a_clear_ends_the_former_job_before_the_next_begins(ray, process):
    trigger = deferred(process())
    cleared = deferred(process(tried=2, max_tries=4))
    assert ray.jobs[trigger.submission_id]["status"] == "STOPPED"
    assert cleared.submission_id != trigger.submission_id
    assert ray.jobs[cleared.submission_id]["status"] == "RUNNING"


def test_a_users_error_is_not_tried_again(ray, process, reach, tmp_path):
    trigger = deferred(process())
    reach(10)
    (tmp_path / "error.json").write_text('{"stage": "train", "message": "x.txt: fix it"}')
    ray.end(trigger.submission_id, "FAILED", driver_exit_code=2)
    with pytest.raises(AirflowFailException, match=r"^x\.txt: fix it$"):
        resumed(process(), event(trigger))


@pytest.fixture
def airflow_says(monkeypatch):
    """What Airflow's supervisor answers to a question about the task; None where it is gone."""

    def answer(states):
        def get_task_states(**_):
            if states is None:
                raise EOFError
            return states

        monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(get_task_states))

    return answer


@pytest.mark.parametrize(
    ("states", "status"),
    [
        ({"run": {"train": "running"}}, "RUNNING"),  # Airflow shuts down, or its server is away
        ({"run": {"train": None}}, "RUNNING"),  # a new scheduler has it run again
        (None, "RUNNING"),  # Airflow can't say
        ({"run": {"train": "failed"}}, "STOPPED"),
        ({"run": {"train": "restarting"}}, "STOPPED"),
        ({}, "STOPPED"),  # the run was deleted
    ],
)
def test_an_end_of_the_process_stops_the_job_only_where_a_user_ended_the_task(
    ray, process, airflow_says, monkeypatch, states, status
):
    trigger = deferred(process())
    airflow_says(states)
    task, context = process()
    # The signal comes while the task looks at the result.
    monkeypatch.setattr(ray_job, "has_result", lambda *_: task.on_kill())
    with pytest.raises(TaskKilledError):
        task.resume(context, {"submission_id": trigger.submission_id, "status": "SUCCEEDED"})
    assert ray.jobs[trigger.submission_id]["status"] == status


@pytest.mark.parametrize(
    ("states", "status"),
    [
        ({"run": {"train": "deferred"}}, "RUNNING"),  # another triggerer has it now
        (None, "RUNNING"),
        ({"run": {"train": "failed"}}, "STOPPED"),
        ({"run": {"train": None}}, "STOPPED"),  # cleared
    ],
)
def test_an_end_of_the_trigger_stops_the_job_only_where_a_user_ended_the_task(
    ray, process, airflow_says, states, status
):
    _, context = process()
    trigger = deferred(process())
    airflow_says(states)
    trigger.task_instance = context["ti"]
    asyncio.run(trigger.on_kill())
    assert ray.jobs[trigger.submission_id]["status"] == status


def test_what_a_job_says_of_its_task(ray, process, tmp_path):
    deferred(process())
    (job,) = ray.submitted
    assert job["metadata"] == {
        "home": str(tmp_path / "home"),
        "workspace": str(tmp_path),
        "dag_id": "dag",
        "dag_run_id": "run",
        "task_id": "train",
        "map_index": "-1",
        "max_tries": "3",
        "began": "2026-01-01T00:00:00+00:00",
    }
    assert "working_dir" not in job["runtime_env"]
