"""Row 16: a user clears or marks the train task; its job ends, and its resources are free."""

import time
from contextlib import ExitStack

import pytest

from pipelines.orchestration.job_state import JobState
from pipelines.platform.dag_runs import DAG
from pipelines.run.logbook import Kind
from tests.faults.pipeline_run import PipelineRun
from tests.faults.processes import handing_over, has_ended, kept_down, train_worker

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

FREE_WITHIN_S = 15.0
TOLD_WITHIN_S = 30.0  # the reconciler asks Airflow what its users did
DECISION: Kind = "human decision"
TASK = "train"


@pytest.mark.parametrize("moment", ["running", "deferred", "triggerer-down"])
@pytest.mark.parametrize("action", ["clear", "failed", "success"])
def test_row_16(scenario, reference, action, moment):
    run = scenario.start()
    workers = []
    with ExitStack() as held:
        if moment == "running":
            with handing_over(run, TASK):
                job = act(run, action)
        else:
            run.wait_for_step()
            workers = [train_worker(run, rank) for rank in (0, 1)]
            if moment == "triggerer-down":
                held.enter_context(kept_down(run.platform, "triggerer"))
                run.expected["service lost"] = 1
            job = act(run, action)
        seconds = free(scenario, run, job, workers, cleared=action == "clear")
    scenario.recoveries.append(seconds)
    scenario.holds(f"job gone, resources free in {seconds:.1f} s")
    run.expected[DECISION] = 1
    if action == "clear":
        scenario.ends_well(run, like=reference)
        assert len(scenario.watch.seen(run, TASK)) == 2
    else:
        stays_as_marked(scenario, run, action)


def act(run: PipelineRun, action: str) -> str:
    """What the buttons of Airflow's page do; the job that the task had."""
    job = JobState.of(run.workspace, TASK, -1).read().submissions[-1]
    if action == "clear":
        body = {"dag_run_id": run.run_id, "task_ids": [TASK], "dry_run": False}
        body |= {"only_failed": False, "include_downstream": True}
        answer = run.airflow._client.post(f"/api/v2/dags/{DAG}/clearTaskInstances", json=body)
    else:
        path = f"/api/v2/dags/{DAG}/dagRuns/{run.run_id}/taskInstances/{TASK}"
        answer = run.airflow._client.patch(path, json={"new_state": action})
    answer.raise_for_status()
    return job


def free(scenario, run: PipelineRun, job: str, workers: list, *, cleared: bool) -> float:
    """Seconds until the job, its processes and its CPUs are free."""
    began = time.monotonic()

    def gone() -> bool:
        if job in scenario.watch.live(run, TASK) or not all(map(has_ended, workers)):
            return False
        return cleared or scenario.watch.used_cpus() == 0  # a cleared task has a new job soon

    run.wait(gone, f"the end of {job}, {FREE_WITHIN_S:.0f} s at most,", FREE_WITHIN_S)
    return time.monotonic() - began


def stays_as_marked(scenario, run: PipelineRun, state: str) -> None:
    """No other job starts; what can't go on without the model says so in one line."""
    assert run.wait_for_end() == "failed"
    assert run.task_state(TASK) == state
    assert len(scenario.watch.seen(run, TASK)) == 1
    scenario.holds(f"{TASK} stays {state}")
    run.wait(lambda: DECISION in run.told, "the decision in the logbook", TOLD_WITHIN_S)
    scenario.explains(run, f"A user stepped in: admin marked {state} it (train")
    if state == "success":
        message = "evaluate reads"
        assert message in (run.workspace / "error.json").read_text()
        scenario.holds("evaluate says in one line that there is no model")
