"""Rows 1 to 4, 6 and 15: what trains dies, and training goes on to the same bits."""

import json

import pytest

from pipelines.core.storage import MARKER, read_json
from pipelines.training.checkpoint.store import CHECKPOINTS
from tests.faults.processes import (
    job_driver,
    kill,
    kill_at,
    lacks_marker,
    terminate,
    train_worker,
    writes_checkpoint,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]


def test_row_01_a_train_worker_mid_step(scenario, reference):
    run = scenario.start()
    run.wait_for_step()
    with run.fault("worker lost"):
        kill(train_worker(run, rank=1))
    scenario.ends_well(run, like=reference)
    scenario.explains(run, "A train worker was lost: rank 1")


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(writes_checkpoint, id="row_02_during_a_checkpoint"),
        pytest.param(lacks_marker, id="row_03_between_checkpoint_and_marker"),
    ],
)
def test_a_train_worker(scenario, reference, moment):
    run = scenario.start()
    run.wait_for_step()
    worker = train_worker(run, rank=0)
    with run.fault("worker lost"):
        kill_at(worker, lambda: moment(run), moment.__name__)
        newest = max(each for each in (run.workspace / CHECKPOINTS).glob("step-*"))
        assert not (newest / MARKER).exists()
    assert not newest.exists() or (newest / MARKER).exists()  # torn no more: deleted, or made anew
    scenario.ends_well(run, like=reference)


def test_row_04_both_train_workers(scenario, reference):
    run = scenario.start()
    run.wait_for_step()
    workers = [train_worker(run, rank) for rank in (0, 1)]
    with run.fault("worker lost"):
        kill(*workers)
    scenario.ends_well(run, like=reference)


def test_row_06_the_job_driver(scenario, reference):
    run = scenario.start()
    run.wait_for_step()
    with run.fault("driver lost"):
        kill(job_driver(run, "train"))
    scenario.ends_well(run, like=reference)
    assert len(scenario.watch.seen(run, "train")) == 2  # by the task's next number


def test_row_15_sigterm_with_30_s_grace(scenario, reference):
    # No checkpoint by number: the one that the run goes on from is the one of the SIGTERM.
    run = scenario.start(train__checkpoint_every=100_000)
    run.wait_for_step()
    workers = [train_worker(run, rank) for rank in (0, 1)]
    with run.fault("preemption"):
        terminate(workers, grace=30)
        (saved,) = (run.workspace / CHECKPOINTS).glob("step-*")
        stopped = read_json(saved / MARKER)["step"]
    assert stopped >= run.history[0]["step"]
    scenario.ends_well(run, like=reference)
    resumed = [json.loads(line) for line in (run.workspace / "logbook.jsonl").open()]
    assert stopped in [each.get("step") for each in resumed if each["kind"] == "resume"]
