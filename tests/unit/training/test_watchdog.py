import logging
import time
from pathlib import Path

import pytest

from pipelines.training.watchdog import Watchdog, warning
from tests.forked import start
from tests.unit.training.conftest import Noted

SECONDS = 0.8


def work(folder: Path, rank: int, sleeps: float) -> None:
    """A process of two, which stands still for a while at its step 3."""
    with Watchdog(folder, rank, 2, SECONDS) as watchdog:
        for step in range(3):
            watchdog.enter_phase(step, "data")
            time.sleep(0.05)
        watchdog.enter_phase(3, "data")
        time.sleep(sleeps)


def test_the_rank_that_stands_still_is_named_with_its_stack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = start(work, tmp_path, 1, 4 * SECONDS)
    noted = Noted()
    with caplog.at_level(logging.WARNING), Watchdog(tmp_path, 0, 2, SECONDS, noted) as watchdog:
        for step in range(4):
            watchdog.enter_phase(step, "data")
            watchdog.enter_phase(step, "optimizer")
        other.join()  # rank 0 stands still, too, as in a collective
    assert noted.entries[-1]["cause"] == caplog.records[-1].getMessage()
    assert set(noted.kinds) == {"stall"}
    line = caplog.records[-1].getMessage()
    assert "rank 1 on" in line
    assert "at step 3, in data; 1 more wait further on" in line
    assert "in work" in (tmp_path / "rank-1.stacks.txt").read_text()


def test_who_moves_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = start(work, tmp_path, 1, 0.0)
    with caplog.at_level(logging.WARNING), Watchdog(tmp_path, 0, 2, SECONDS) as watchdog:
        step = 0
        while other.is_alive():
            watchdog.enter_phase(step, "data")
            step += 1
            time.sleep(0.01)
    assert not caplog.records
    assert (tmp_path / "rank-1.stacks.txt").read_text() == ""
    assert not list(tmp_path.glob("*.json"))


def test_all_that_are_furthest_behind_are_named() -> None:
    notes = [
        {"rank": rank, "host": f"h{rank}", "step": step, "phase": phase, "beats": beats}
        for rank, step, phase, beats in [
            (0, 7, "data", 30),
            (1, 7, "forward and backward", 29),
            (2, 7, "forward and backward", 29),
            (3, 8, "data", 32),
        ]
    ]
    line = warning(notes, 300, Path("w"))
    assert "rank 1 on h1, rank 2 on h2 at step 7, in forward and backward; 2 more" in line


def test_a_full_disk_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "heartbeats"
    with caplog.at_level(logging.WARNING), Watchdog(folder, 0, 1, 0.2) as watchdog:
        watchdog.enter_phase(0, "data")
        folder.rename(tmp_path / "aside")
        folder.write_text("")  # nothing can be written below it
        while "can't be written" not in caplog.text or "can't be read" not in caplog.text:
            time.sleep(0.01)
        folder.unlink()
        (tmp_path / "aside").rename(folder)
        watchdog.enter_phase(1, "data")
        note = folder / "rank-0.json"
        while not note.is_file() or '"step": 1' not in note.read_text():
            time.sleep(0.01)
        while "no move for 0.2 s: rank 0" not in caplog.text:  # rank 0 still watches
            time.sleep(0.01)
