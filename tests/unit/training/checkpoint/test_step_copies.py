"""A run goes on from the copies in memory: at most one step is lost, and the bits are the same."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.core.errors import UserError
from pipelines.training.checkpoint import step_copies
from pipelines.training.checkpoint.step_copies import StepCopies
from pipelines.training.checkpoint.store import CheckpointStore
from tests.unit.crashes.crash_points import crashes, every_point
from tests.unit.training.conftest import Run
from tests.unit.training.test_recovery import NAN, Poisoned
from tests.unit.training.test_trainer import same_weights

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
EACH = {"copy_every": 1, "checkpoint_every": 100}


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the machine's memory."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(step_copies, "MEMORY", folder)
    return folder


def files(memory: Path) -> list[Path]:
    return list(memory.rglob("*.safetensors"))


def dies_at(run: Run, step: int) -> None:
    """Train until the report of a step, whose copy is not made."""
    report = run.trainer.report

    def told(metrics: Any) -> None:
        report(metrics)
        if metrics.step == step:
            raise InterruptedError

    run.trainer.report = told
    with pytest.raises(InterruptedError):
        run.trainer.fit()


def test_it_goes_on_from_the_step_before(start: Callable[..., Run], memory: Path) -> None:
    whole = start("whole")
    whole.trainer.fit()
    first = start("cut", **EACH)
    dies_at(first, 7)
    second = start("cut", **EACH)
    second.trainer.fit()
    assert [point.step for point in second.points] == [7, 8, 9, 10]
    assert same_weights(whole.model, second.model)
    points = {p.step: p.curve_point() for p in (*first.points, *second.points)}
    assert list(points.values()) == [p.curve_point() for p in whole.points]
    assert files(memory) == []


def test_what_a_checkpoint_is_compared_by_is_kept(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    start("whole", checkpoint_every=8).trainer.fit()
    dies_at(start("cut", **EACH | {"checkpoint_every": 8}), 5)
    start("cut", **EACH | {"checkpoint_every": 8}).trainer.fit()
    whole, cut = (CheckpointStore(tmp_path / each).facts(8) for each in ("whole", "cut"))
    assert whole["loss"] == cut["loss"]
    assert whole["others"] == cut["others"]


def test_a_newer_checkpoint_comes_first(start: Callable[..., Run]) -> None:
    every_third = {"copy_every": 3, "checkpoint_every": 4}
    dies_at(start("cut", **every_third), 6)
    again = start("cut", **every_third)
    again.trainer.fit()
    assert again.points[0].step == 5


def test_a_file_that_a_killed_process_was_writing_goes(
    start: Callable[..., Run], memory: Path
) -> None:
    dies_at(start("cut", **EACH), 7)
    (spare,) = memory.rglob("*.unfinished")
    spare.write_bytes(spare.read_bytes()[:-9])
    start("cut", **EACH).trainer.fit()
    assert list(memory.glob("*/*")) == []


def test_two_files_are_kept_and_the_last_start_counts(
    start: Callable[..., Run], memory: Path
) -> None:
    dies_at(start("cut", **EACH), 7)
    steps = {int(path.name.split("-")[0]) for path in files(memory)}
    assert steps == {5, 6}
    store = CheckpointStore(memory.parent / "cut")
    before = store.start()
    dies_at(start("cut", **EACH), 7)  # before it has made a copy
    after = store.start()
    assert before is not None and after is not None
    assert (after.step, after.after) == (6, before.name)
    again = start("cut", **EACH)
    again.trainer.fit()
    assert again.points[0].step == 7


def test_a_run_that_goes_back_leaves_its_copies(start: Callable[..., Run]) -> None:
    settings = EACH | {"checkpoint_every": 4, "max_bad_steps": 2, "steps": 12}
    whole = Poisoned(start("whole", **settings), {6: NAN, 7: NAN}).run
    whole.trainer.fit()
    first = Poisoned(start("cut", **settings), {6: NAN, 7: NAN}).run
    dies_at(first, 6)  # it went back before it reported step 7, and step 6 is reported only now
    second = Poisoned(start("cut", **settings), {6: NAN, 7: NAN}).run
    second.trainer.fit()
    assert second.points[0].step >= 6
    assert same_weights(whole.model, second.model)


def test_checkpoints_that_were_deleted_take_their_copies_along(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    dies_at(start("cut", **EACH), 7)
    CheckpointStore(tmp_path / "cut").clear()
    again = start("cut", **EACH)
    again.trainer.fit()
    assert again.points[0].step == 1


def test_the_files_of_a_run_that_nobody_goes_on_with_are_deleted(
    start: Callable[..., Run], memory: Path
) -> None:
    dies_at(start("left", **EACH), 7)
    dies_at(start("hurt", **EACH), 7)
    left, hurt = sorted(
        {path.parent for path in files(memory)}, key=lambda path: path.stat().st_mtime
    )
    os.utime(left, (time.time() - 2 * step_copies.STALE_S,) * 2)
    start("third", **EACH).trainer.fit()
    assert not left.exists()
    assert len(files(hurt)) == 2


def test_too_little_memory_is_one_line(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_copies, "memory_bytes", lambda: (1 << 30, 1000))
    with pytest.raises(UserError, match=r"train.copy_every = 1 takes up to .* left; set 0"):
        start("cut", **EACH).trainer.fit()


def test_memory_that_is_full_costs_copies_but_not_the_run(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    run = start("cut", **EACH)
    monkeypatch.setattr(step_copies, "write_one_by_one", full)
    run.trainer.fit()
    assert run.points[-1].step == 10
    assert "no copy of step 1 (No space left on device)" in caplog.text


def no_death_costs_more(start: Callable[..., Run], tmp_path: Path, every: int) -> None:
    settings = {"copy_every": every, "steps": 5, "checkpoint_every": 3 if every == 1 else 100}
    whole = start("whole", **settings)
    whole.trainer.fit()

    def one(stop: int) -> bool:
        first = start(f"cut-{stop}", **settings)
        died = crashes(tmp_path, first.trainer.fit, stop)
        done = len(first.points)
        again = start(f"cut-{stop}", **settings)
        again.trainer.fit()
        lost = done + 1 - again.points[0].step if again.points else 0
        assert lost < 2 * every
        assert same_weights(whole.model, again.model)
        return died

    assert every_point(one) > 20


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 2])
def test_no_death_costs_more_than_a_step_or_twice_as_many_as_between_copies(
    start: Callable[..., Run], tmp_path: Path, every: int
) -> None:
    no_death_costs_more(start, tmp_path, every)


@pytest.mark.long
def test_a_file_that_goes_before_the_next_is_there_is_caught(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StepCopies._write

    def too_early(self: StepCopies, *arguments: Any) -> None:
        for each in self._files():
            each.path.unlink()
        write(self, *arguments)

    monkeypatch.setattr(StepCopies, "_write", too_early)
    with pytest.raises(AssertionError):
        no_death_costs_more(start, tmp_path, 1)
