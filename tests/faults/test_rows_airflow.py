"""Rows 9 to 12: parts of Airflow die while a stage runs, and while its job is handed over.

Each row is one run that is hurt three times: in *preprocess*, between the submission of *train*'s
job and the task's defer, and while it trains.
"""

import itertools
import time
from collections.abc import Callable

import pytest

from pipelines.platform.parts import AIRFLOW
from tests.faults.conftest import unhurt
from tests.faults.pipeline_run import STEPS, PipelineRun
from tests.faults.processes import (
    airflow_task,
    handing_over,
    kept_down,
    kill,
    service,
    wait_until_seen,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

# In the key of *preprocess*, and new for each row, so that it runs; no document is malformed.
_fractions = itertools.count(500)


def test_row_09_the_airflow_task_process_as_it_hands_over(scenario, reference):
    run = scenario.start()
    with run.fault("task lost", lambda: run.step > 0), handing_over(run, "train") as task:
        kill(task)
    scenario.ends_well(run, like=reference)
    assert len(scenario.watch.seen(run, "train")) == 1


def test_row_09_the_airflow_task_process(scenario, reference):
    run = scenario.start(**fresh_data())
    task = airflow_task(run, "preprocess")
    with run.fault("task lost", lambda: run.task_state("preprocess") == "success"):
        kill(task)
    task = airflow_task(run, "validate")
    with run.fault("task lost", lambda: run.task_state("validate") == "success"):
        kill(task)
    with run.fault("task lost", lambda: run.step > 0), handing_over(run, "train") as task:
        kill(task)
    ends_with_one_job_each(scenario, run, reference)


def fresh_data() -> dict[str, float]:
    """What the stage cache has no data of."""
    return {"data__source__max_malformed_fraction": next(_fractions) / 1000}


# Training goes on beside two outages, and until the reconciler knows what came back.
LONGER = {"train__steps": 3 * STEPS}


@pytest.fixture(scope="module")
def longer(platform, watch) -> PipelineRun:
    return unhurt(platform, watch, "penstock-longer", **LONGER)


def test_row_10_the_scheduler(scenario, longer):
    hurt_three_times(scenario, longer, lambda platform: kill(service(platform, "scheduler")))


def test_row_11_the_triggerer(scenario, longer):
    hurt_three_times(scenario, longer, lambda platform: kill(service(platform, "triggerer")))


def test_row_12_all_of_airflow_for_20_s(scenario, longer):
    def away(platform):
        with kept_down(platform, *AIRFLOW):
            time.sleep(20)

    hurt_three_times(scenario, longer, away, entries=len(AIRFLOW), tasks=1)


def hurt_three_times(scenario, reference, hurt: Callable, entries: int = 1, tasks: int = 0) -> None:
    """The run ends like the one without a fault, and each stage had one job.

    Args:
        scenario: of the platform.
        reference: a run without a fault.
        hurt: what kills parts of the platform.
        entries: how many parts it kills.
        tasks: how many processes of tasks die with them, which *train*'s does as it hands over.
    """
    run = scenario.start(**fresh_data(), **LONGER)
    run.wait_for_task("preprocess", "deferred")
    with run.fault("service lost", lambda: run.has_result("preprocess"), entries):
        hurt(scenario.platform)
    with run.fault("service lost", lambda: run.step > 0, entries), handing_over(run, "train"):
        wait_until_seen(scenario.platform)  # parts that die before were never there for a run
        hurt(scenario.platform)
    if tasks:
        run.expected["task lost"] = tasks
    wait_until_seen(scenario.platform)
    run.wait_for_step()
    with run.fault("service lost", entries=entries):
        hurt(scenario.platform)
    ends_with_one_job_each(scenario, run, reference)


def ends_with_one_job_each(scenario, run: PipelineRun, reference: PipelineRun) -> None:
    """Nobody started a job again because it lost sight of it."""
    scenario.ends_well(run, like=reference)
    jobs = {stage: len(scenario.watch.seen(run, stage)) for stage in ("preprocess", "train")}
    assert jobs == {"preprocess": 1, "train": 1}
    scenario.holds("no job was submitted again")
