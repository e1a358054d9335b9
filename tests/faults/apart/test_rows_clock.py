"""Row 20: the clock of all processes is set back by an hour, or put on by a day, in a run.

They have a platform of their own, as a machine's clock would be everyone's.
"""

import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.conftest import Platform, running_platform
from tests.faults.pipeline_run import until
from tests.faults.shifted_clock import ShiftedClock, shifted_clock
from tests.faults.training_process import LIMIT_S, Training

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def clock() -> Iterator[ShiftedClock]:
    with shifted_clock() as clock:
        yield clock


@pytest.fixture(scope="module")
def platform(clock: ShiftedClock) -> Iterator[Platform]:
    with running_platform(**clock.variables) as platform:
        yield platform


@pytest.mark.parametrize(
    ("shift", "told"),
    [
        pytest.param("-1h", "was set back by 60 min", id="back_by_an_hour"),
        pytest.param("+1d", "was put on by 24 h", id="on_by_a_day"),
    ],
)
def test_row_20_the_clock(scenario, reference, clock, shift, told):
    run = scenario.start()
    run.wait_for_step()
    try:
        with run.fault("clock"):
            clock.shift(shift)
        if shift == "-1h":  # Airflow's tables say that the run begins in an hour, which passes
            run.wait_for_task("train", "success")
            time.sleep(10)
            assert run.task_state("evaluate") is None
            with run.fault("clock", goes_on=lambda: run.has_result("evaluate")):
                clock.shift("+0")
        scenario.ends_well(run, like=reference)
        assert len(scenario.watch.seen(run, "train")) == 1
        scenario.explains(run, f"The clock jumped: that of {socket.gethostname()} {told}")
    finally:
        clock.shift("+0")


@pytest.mark.parametrize("shift", ["-1h", "+1d"], ids=["back_by_an_hour", "on_by_a_day"])
def test_row_20_the_clock_of_a_training_alone(clock, tmp_path, record_property, shift):
    """It is killed, too: what it wrote before is read by another clock."""
    whole = Training(tmp_path / "whole")
    whole.finish()
    training = Training(tmp_path / "hurt", clock.variables)
    try:
        with training.process():
            until(lambda: len(training.history) > 10, "training", LIMIT_S)
            clock.shift(shift)
            step = training.history[-1]["step"]
            until(lambda: training.history[-1]["step"] > step + 20, "going on", LIMIT_S)
        training.finish()
    finally:
        clock.shift("+0")
    assert training.model() == whole.model()
    record_property("checks", json.dumps(["success", "weights identical", training.why()[0]]))
