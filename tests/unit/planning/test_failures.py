import math

import pytest

from pipelines.planning.storage_needs import (
    DEVICE_MTBF_HOURS,
    daly_interval,
    expected_seconds,
    failures,
    young_interval,
)

HOUR = 3600


def test_young() -> None:
    """Five minutes a checkpoint, a day between failures: every two hours."""
    assert young_interval(5 * 60, 24 * HOUR) == pytest.approx(2 * HOUR)


def test_daly() -> None:
    """sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d, worked by hand for d = M / 50."""
    assert daly_interval(2, 100) == pytest.approx(20 * (1 + 0.1 / 3 + 0.01 / 9) - 2)
    assert daly_interval(300, 100) == 100


@pytest.mark.parametrize("stall", [1.0, 60.0, 600.0])
def test_the_interval_loses_the_least(stall: float) -> None:
    best = daly_interval(stall, 6 * HOUR)
    took = [
        expected_seconds(1e6, best * factor, stall, 6 * HOUR, 600) for factor in (0.8, 1.0, 1.25)
    ]
    assert took[1] == min(took)


def test_llama_3_was_interrupted_every_three_hours() -> None:
    """419 unexpected interruptions in 54 days on 16,384 GPUs."""
    assert failures(1, 16_384, 1).mtbf_hours == pytest.approx(54 * 24 / 419)
    assert pytest.approx(50_676, rel=1e-4) == DEVICE_MTBF_HOURS
    run = failures(54 * 24 * HOUR * 0.9, 16_384, 10, restart_seconds=600)
    assert run.restarts == pytest.approx(419, rel=0.1)


def test_without_failures_only_checkpoints_cost_time() -> None:
    assert expected_seconds(1000, 100, 1, 1e12, 0) == pytest.approx(1010, rel=1e-6)


def test_a_run_that_never_gets_through_is_endless() -> None:
    assert expected_seconds(1e6, 1e6, 1, 1000, 600) == math.inf
