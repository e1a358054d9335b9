"""What a stage held, summed over its tries."""

import os
import time

import pytest

from pipelines.run.progress import PROGRESS_FILE
from pipelines.run.usage import USAGE, cached, holds, metered, usage_of


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only the test moves."""
    now = [1000.0]
    monkeypatch.setattr("pipelines.run.usage.time.time", lambda: now[0])
    monkeypatch.setattr("pipelines.run.usage._boot", lambda: "")  # nothing but that clock
    return now


@pytest.fixture
def set_by(monkeypatch):
    """How far the machine's clock was set, in seconds."""
    moved, wall = [0.0], time.time
    monkeypatch.setattr("pipelines.run.usage.time.time", lambda: wall() + moved[0])
    return moved


@pytest.mark.parametrize("shift", [-3600.0, 86400.0])
def test_a_clock_that_was_set_neither_adds_nor_takes_time(tmp_path, set_by, shift):
    with metered(tmp_path, "train"):
        set_by[0] = shift
    assert usage_of(tmp_path, "train").seconds < 60
    set_by[0] = 0.0
    killed = metered(tmp_path, "train")
    killed.__enter__()  # and never left, as after kill -9
    set_by[0] = shift
    moment = time.time()  # by the clock that was set
    (tmp_path / PROGRESS_FILE).write_text("{}")
    os.utime(tmp_path / PROGRESS_FILE, (moment, moment))
    with metered(tmp_path, "train"):
        pass
    assert usage_of(tmp_path, "train").seconds < 60


def test_a_try_holds_one_cpu_until_it_says_more(tmp_path, clock):
    with metered(tmp_path, "train"):
        clock[0] += 600
        holds(tmp_path, "train", workers=4, gpus=4)
        clock[0] += 1800
        holds(tmp_path, "train", workers=2, gpus=2)  # two nodes were lost
        clock[0] += 3600
    used = usage_of(tmp_path, "train")
    assert used.seconds == 6000
    assert used.worker_hours == pytest.approx(1 / 6 + 2 + 2)
    assert used.gpu_hours == pytest.approx(2 + 2)
    assert (used.endings, used.last) == (1, clock[0])


def test_a_killed_try_counts_until_its_progress_stood_still(tmp_path, clock):
    killed = metered(tmp_path, "train")
    killed.__enter__()  # and never left, as after kill -9
    progress = tmp_path / PROGRESS_FILE
    progress.write_text("{}")
    os.utime(progress, (clock[0] + 100, clock[0] + 100))
    clock[0] += 5000  # nothing ran meanwhile
    with metered(tmp_path, "train"):
        clock[0] += 50
    assert usage_of(tmp_path, "train").seconds == 150


def test_a_try_that_failed_costs_and_is_no_ending(tmp_path, clock):
    with pytest.raises(OSError, match="full"), metered(tmp_path, "train"):
        clock[0] += 30
        raise OSError("full")
    used = usage_of(tmp_path, "train")
    assert (used.seconds, used.endings) == (30, 0)


def test_stages_are_apart_and_a_torn_line_is_passed_over(tmp_path, clock):
    with metered(tmp_path, "preprocess"):
        clock[0] += 10
    with (tmp_path / USAGE).open("a") as file:
        file.write('{"stage": "train", "ev')
    with metered(tmp_path, "train"):
        clock[0] += 20
    assert usage_of(tmp_path, "preprocess").seconds == 10
    assert usage_of(tmp_path, "train").seconds == 20


def test_a_cached_stage_used_nothing_and_keeps_its_time(tmp_path, clock):
    cached(tmp_path, "train")
    clock[0] += 60
    cached(tmp_path, "train")
    assert usage_of(tmp_path, "train") == (0, 0, 0, 0, 1000.0)


def test_what_can_not_be_noted_ends_nothing(tmp_path, caplog):
    (tmp_path / USAGE).mkdir()  # as good as a full disk
    with metered(tmp_path, "train"):
        pass
    assert "could not write event began of stage train" in caplog.text
