"""Row 29: parts get SIGSTOP and stand still for 30 s: alive, silent, and back as if nothing was."""

import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress

import psutil
import pytest

from tests.faults.pipeline_run import PipelineRun
from tests.faults.processes import frozen, job_driver, service, train_worker
from tests.faults.test_rows_airflow import fresh_data

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

STILL_S = 30


def test_row_29_the_scheduler_triggerer_api_server_and_mlflow_stand_still(scenario, reference):
    """Each in a stage of its own; nobody takes over from what only stands still."""
    run = scenario.start(**fresh_data())
    run.wait_for_task("preprocess", "deferred")
    stand_still(part(run, "scheduler"))
    run.wait_for_step()
    stand_still(part(run, "triggerer"))
    run.wait_for_task("evaluate", "deferred", "success")
    stand_still(part(run, "api-server"))
    run.wait_for_task("register", "running", "success")
    stand_still(part(run, "mlflow"))
    scenario.ends_well(run, like=reference)
    jobs = {stage: len(scenario.watch.seen(run, stage)) for stage in ("preprocess", "train")}
    assert jobs == {"preprocess": 1, "train": 1}
    scenario.holds("no job was submitted again")


def test_row_29_a_train_worker_and_the_driver_stand_still(scenario, reference):
    run = scenario.start()
    run.wait_for_step()
    stand_still([train_worker(run, rank=1)])
    goes_on(run)
    stand_still([job_driver(run, "train")])
    goes_on(run)
    scenario.ends_well(run, like=reference)
    assert len(scenario.watch.seen(run, "train")) == 1


def test_row_29_the_ray_head_stands_still(scenario, reference):
    """Ray may take its own silence for a death; then one retry makes the one result."""
    run = scenario.start()
    run.wait_for_step()
    stand_still(part(run, "ray"))
    goes_on(run)
    lost = ("worker lost", "node lost", "driver lost", "cluster lost")
    found = run.told & {*lost}
    run.expected |= dict.fromkeys(found, 1)
    scenario.holds(f"Ray took it for: {', '.join(found) or 'nothing'}")
    scenario.ends_well(run, like=reference)


def part(run: PipelineRun, name: str) -> list[psutil.Process]:
    """A part of the platform, with all that it started."""
    root = service(run.platform, name)
    return [root, *root.children(recursive=True)]


def stand_still(processes: Iterable[psutil.Process]) -> None:
    """SIGSTOP, 30 s, SIGCONT."""
    with ExitStack() as held:
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # a child that has ended, or whose end is not read
                if process.status() != psutil.STATUS_ZOMBIE:
                    held.enter_context(frozen(process))
        time.sleep(STILL_S)


def goes_on(run: PipelineRun) -> None:
    """Training comes further than it was."""
    step = run.step
    run.wait(lambda: run.step > step or run.has_result("train"), f"a step after {step}", 240)
