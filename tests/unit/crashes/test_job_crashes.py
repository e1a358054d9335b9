"""A task has one job, whichever write of it was the last, and whoever else works on it.

Ray's side is `FakeRay`; the operator, its state and the reconciler are the real ones.
"""

import asyncio
import json
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import TaskDeferred
from httpx import create_ssl_context
from httpx._transports import default

from pipelines.core.settings import load_settings
from pipelines.orchestration import jobs_api, ray_job, ray_job_trigger
from pipelines.orchestration.job_state import JobState, OutdatedError, OvertakenError
from pipelines.orchestration.jobs_api import stop_job
from pipelines.orchestration.ray_job import RayJobOperator
from pipelines.orchestration.ray_job_trigger import RayJobTrigger
from pipelines.platform.reconciler import reconcile_once
from pipelines.run.logbook import read_logbook
from tests.unit.crashes.crash_points import asked, crashes, every_point, meets
from tests.unit.orchestration.fake_ray import KILLED, FakeRay, task_instance


@pytest.fixture
def ray(monkeypatch, tmp_path):
    ray = FakeRay()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray.url)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    context = create_ssl_context()  # once: it loads all CAs
    monkeypatch.setattr(default, "create_ssl_context", lambda **_: context)
    quick = SimpleNamespace(timeout=asyncio.timeout, sleep=lambda _: asyncio.sleep(0))
    monkeypatch.setattr(jobs_api, "asyncio", quick)
    yield ray
    ray.stop()


def go(workspace, *, max_tries=3, event=None, as_trigger=False, day=1):
    """One process of the task; returns the id of the job that it waits for, or `finished`."""
    task = RayJobOperator(
        task_id="train",
        entrypoint="true",
        workspace=str(workspace),
        result="result",
        returns="finished",
    )
    ti = task_instance(1, max_tries)
    ti.start_date = ti.start_date.replace(day=day)
    try:
        return task.resume({"ti": ti}, event) if event else task.execute({"ti": ti})
    except TaskDeferred as deferred:
        deferred.trigger.task_instance = ti
        return deferred.trigger if as_trigger else deferred.trigger.submission_id


def nothing(ray, workspace):
    return partial(go, workspace)


def a_job_that_made_progress_and_died(ray, workspace):
    first = go(workspace)
    get_on(workspace, 10)
    ray.end(first, "FAILED", **KILLED)
    return partial(go, workspace, event=ray.jobs[first])


def a_job_that_made_progress_and_whose_end_nobody_saw(ray, workspace):
    a_job_that_made_progress_and_died(ray, workspace)
    return partial(go, workspace)


def get_on(workspace, steps):
    line = {"stage": "train", "done": steps, "total": 100, "unit": "steps"}
    with (workspace / "progress.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def a_job_that_succeeded(ray, workspace):
    first = go(workspace)
    (workspace / "result").touch()
    ray.end(first, "SUCCEEDED")
    return partial(go, workspace, event=ray.jobs[first])


def a_job_whose_task_was_cleared(ray, workspace):
    go(workspace)
    return partial(go, workspace, max_tries=4)


def a_deferred_task_that_a_user_ends(ray, workspace):
    trigger = go(workspace, as_trigger=True)
    return lambda: asyncio.run(trigger.on_kill())


def live(ray):
    return [name for name, job in ray.jobs.items() if job["status"] == "RUNNING"]


def fresh(ray, tmp_path, stop):
    ray.jobs.clear()
    ray.submitted.clear()
    workspace = tmp_path / "home/runs" / str(stop)
    workspace.mkdir(parents=True)
    return workspace


def one_job(ray, tmp_path, begin, then, jobs):
    """At each write the task's process dies, and the next one goes on, as `then` says."""

    def at(stop):
        workspace = fresh(ray, tmp_path, stop)
        died = crashes(workspace, begin(ray, workspace), stop)
        before = set(ray.jobs)
        waits = go(workspace, max_tries=then)
        assert live(ray) == [waits] if waits != "finished" else live(ray) == []
        assert len(ray.submitted) <= jobs
        assert JobState.of(workspace, "train", -1).read().submissions[-1:] == (*ray.jobs,)[-1:]
        if then > 3 and begin is nothing:
            assert waits not in before  # a Clear never attaches to the former job
        if begin is a_job_that_made_progress_and_died:
            told = [entry.kind for entry in read_logbook(workspace)]
            assert told.count("driver lost") == 1
        return died

    return every_point(at)


CASES = [
    (nothing, 3, 1),
    (nothing, 4, 2),  # a user clears the task after its process died
    (a_job_that_made_progress_and_died, 3, 2),
    (a_job_that_succeeded, 3, 1),
    (a_job_whose_task_was_cleared, 4, 2),
    (a_deferred_task_that_a_user_ends, 3, 2),
]


@pytest.fixture(autouse=True)
def task_is_cleared(monkeypatch):
    """What Airflow says of a task when its trigger is ended."""
    monkeypatch.setattr(ray_job_trigger, "state_of", lambda _: "")


@pytest.mark.parametrize(("begin", "then", "jobs"), CASES)
def test_every_crash(ray, tmp_path, begin, then, jobs):
    assert one_job(ray, tmp_path, begin, then, jobs) >= 3


class Airflow:
    """Its answers about the task; a user cleared it on the second of January, unless `cleared`."""

    def __init__(self, state="deferred", max_tries=4, cleared=False):
        self.state, self.max_tries, self.cleared = state, max_tries, cleared

    def task(self, *_):
        asked()
        return self.state and {"state": self.state, "max_tries": self.max_tries}

    def events(self, _, after):
        asked()
        what = {"dag_id": "dag", "dag_run_id": "run", "task_ids": ["train"], "only_failed": False}
        return [{"extra": json.dumps(what)}] if self.cleared and after < "2026-01-02" else []


@pytest.mark.parametrize(
    ("begin", "others"),
    [
        (nothing, 3),
        (nothing, 4),
        (a_job_that_made_progress_and_died, 3),
        (a_job_that_made_progress_and_whose_end_nobody_saw, 3),
        (a_job_that_made_progress_and_died, 4),
        (a_job_whose_task_was_cleared, 4),
    ],
)
def test_every_meeting_of_two_processes(ray, tmp_path, begin, others):
    two_processes(ray, tmp_path, begin, others)


def two_processes(ray, tmp_path, begin, others):
    """At each write of one process another one runs; 4: of a task that was cleared meanwhile."""

    def outdated_or(act):
        with suppress(OutdatedError) if others > 3 else nullcontext():
            act()

    def at(stop):
        workspace = fresh(ray, tmp_path, stop)
        waits = []
        act = partial(outdated_or, begin(ray, workspace))
        before = len(ray.submitted)

        def other():
            waits.append(go(workspace, max_tries=others))
            get_on(workspace, 20)  # its job

        met = meets(workspace, act, stop, other)
        if others == 3:  # none is cleared: no second job even for a moment, and no retry used up
            assert len(ray.submitted) == before + 1
            if met:
                ray.end(waits[0], "FAILED", **KILLED)
                waits = [go(workspace)]
        elif met:
            reconcile_once(load_settings(), Airflow)
        if live(ray):  # else the only job was of a process from before the Clear
            assert live(ray) == (waits or live(ray)[:1])
            assert go(workspace, max_tries=others) == live(ray)[0]
        again = go(workspace, max_tries=others + 1)
        assert live(ray) == [again]
        return met

    assert every_point(at) >= 5


def sent_before_it_is_noted(self, context, state, current, submission_id):
    asyncio.run(self._send(context, submission_id))
    state.update(current, submissions=(*current.submissions, submission_id))


def counted_before_it_is_told(self, state, current, job):
    state.update(current, n=current.n + 1, submitted=False)
    return note_failure(self, state, current, job)


async def stopped_before_it_is_closed(trigger):
    await stop_job(trigger.submission_id, Path(trigger.workspace))
    JobState(Path(trigger.state_path)).close(trigger.submission_id)


async def found_before_the_former_ended(workspace, submission_id, former):
    return await find_job(workspace, submission_id, None)


note_failure, find_job = RayJobOperator._note_failure, ray_job._find_job


@pytest.mark.parametrize(
    ("owner", "name", "swapped", "case"),
    [
        (RayJobOperator, "_submit", sent_before_it_is_noted, CASES[1]),
        (RayJobOperator, "_note_failure", counted_before_it_is_told, CASES[2]),
        (ray_job, "_find_job", found_before_the_former_ended, CASES[4]),
        (RayJobTrigger, "on_kill", stopped_before_it_is_closed, CASES[5]),
    ],
)
def test_two_writes_in_the_other_order_are_caught(
    ray, tmp_path, monkeypatch, owner, name, swapped, case
):
    monkeypatch.setattr(owner, name, swapped)
    with pytest.raises((AssertionError, RuntimeError)):
        one_job(ray, tmp_path, *case)


@pytest.mark.parametrize(
    ("begin", "others", "asks"),
    [
        (a_job_that_made_progress_and_died, 4, ()),
        (a_job_that_made_progress_and_whose_end_nobody_saw, 3, ("generation",)),
        (nothing, 3, ("generation", "n")),
    ],
)
def test_a_state_that_asks_for_less_of_what_was_seen_is_caught(
    ray, tmp_path, monkeypatch, begin, others, asks
):
    asks_only(monkeypatch, *asks)
    with pytest.raises((AssertionError, RuntimeError)):
        two_processes(ray, tmp_path, begin, others)


def asks_only(monkeypatch, *asks):
    def update(self, seen, **changes):
        with self._locked():
            known = self.read()
            if any(getattr(known, each) != getattr(seen, each) for each in asks):
                raise OvertakenError
            return self._write(known.model_copy(update=changes))

    monkeypatch.setattr(JobState, "update", update)


# The reconciler. A Clear raises `max_tries`, or only Airflow's log of users' actions tells it.
CLEARS = [Airflow(), Airflow("running", 3, cleared=True)]


def reconcile(airflow):
    return reconcile_once(load_settings(), lambda: airflow)


def ends_well(ray, workspace, airflow, first, waits):
    """The job from before the Clear is gone, and the cleared task has one, which stays."""
    again = partial(go, workspace, max_tries=airflow.max_tries, day=3)
    reconcile(airflow)
    if ray.jobs[waits]["status"] != "RUNNING":
        waits = again(event=ray.jobs[waits])
    assert live(ray) == [waits] != [first]
    assert reconcile(airflow) == []
    assert again() == waits
    assert {job["status"] for name, job in ray.jobs.items() if name != first} == {"RUNNING"}


def no_crash_of_the_reconciler_leaves_two_or_none(ray, tmp_path, airflow):
    def at(stop):
        workspace = fresh(ray, tmp_path, stop)
        first = go(workspace)
        died = crashes(workspace, lambda: reconcile(airflow), stop)
        waits = go(workspace, max_tries=airflow.max_tries, day=3)
        ends_well(ray, workspace, airflow, first, waits)
        return died

    return every_point(at)


def no_meeting_with_the_reconciler_ends_an_owned_job(ray, tmp_path, airflow, leads):
    def at(stop):
        workspace = fresh(ray, tmp_path, stop)
        first, waits = go(workspace), []
        two = [
            lambda: reconcile(airflow),
            lambda: waits.append(go(workspace, max_tries=airflow.max_tries, day=3)),
        ]
        act, other = two if leads == "reconciler" else two[::-1]
        met = meets(workspace, act, stop, other)
        waits = waits or [go(workspace, max_tries=airflow.max_tries, day=3)]
        ends_well(ray, workspace, airflow, first, waits[0])
        return met

    return every_point(at)


@pytest.mark.parametrize("airflow", CLEARS)
def test_every_crash_of_the_reconciler(ray, tmp_path, airflow):
    assert no_crash_of_the_reconciler_leaves_two_or_none(ray, tmp_path, airflow) >= 4


@pytest.mark.parametrize("airflow", CLEARS)
@pytest.mark.parametrize("leads", ["reconciler", "task"])
def test_every_meeting_with_the_reconciler(ray, tmp_path, airflow, leads):
    assert no_meeting_with_the_reconciler_ends_an_owned_job(ray, tmp_path, airflow, leads) >= 4


@pytest.mark.parametrize("state", ["failed", "success", "removed", None])
def test_a_reconciler_that_died_leaves_no_job_without_a_task(ray, tmp_path, state):
    def at(stop):
        go(workspace := fresh(ray, tmp_path, stop))
        died = crashes(workspace, lambda: reconcile(Airflow(state, 3)), stop)
        reconcile(Airflow(state, 3))
        assert live(ray) == []
        return died

    assert every_point(at) >= 3


def test_a_task_that_was_not_cleared_keeps_its_job(ray, tmp_path):
    def at(stop):
        workspace = fresh(ray, tmp_path, stop)
        running = Airflow("running", 3)
        met = meets(workspace, partial(go, workspace), stop, lambda: reconcile(running))
        assert live(ray) == [*ray.jobs] == [go(workspace)]
        return met

    assert every_point(at) >= 5


def test_a_reconciler_that_stops_before_it_closes_is_caught(ray, tmp_path, monkeypatch):
    closed, late = JobState.close, []
    stop = jobs_api.JobsApi.stop

    async def stopped_first(self, submission_id):
        await stop(self, submission_id)
        for state in late:
            closed(state, submission_id)

    monkeypatch.setattr(JobState, "close", lambda state, _: late.append(state))
    monkeypatch.setattr(jobs_api.JobsApi, "stop", stopped_first)
    with pytest.raises((AssertionError, RuntimeError)):
        no_crash_of_the_reconciler_leaves_two_or_none(ray, tmp_path, CLEARS[1])


def test_a_reconciler_that_closes_whichever_job_counts_is_caught(ray, tmp_path, monkeypatch):
    close = JobState.close
    monkeypatch.setattr(JobState, "close", lambda self, _: close(self, self.read().submissions[-1]))
    with pytest.raises(AssertionError):
        no_meeting_with_the_reconciler_ends_an_owned_job(ray, tmp_path, CLEARS[0], "reconciler")


def test_a_task_that_does_not_see_that_the_reconciler_closed_is_caught(ray, tmp_path, monkeypatch):
    asks_only(monkeypatch, "generation", "n", "submissions")
    with pytest.raises(RuntimeError, match="stopped, but not by Airflow"):
        no_meeting_with_the_reconciler_ends_an_owned_job(ray, tmp_path, CLEARS[1], "task")
