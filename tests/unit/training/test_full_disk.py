"""Checkpoints that can't be written for a while: training goes on, and saves later."""

import errno
import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.core.errors import SharedError, UserError
from pipelines.training.checkpoint import checkpointer, dcp_files, patience
from pipelines.training.checkpoint.store import CheckpointStore
from tests.unit.training.conftest import Noted
from tests.unit.training.test_trainer import same_weights


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set there is no room for what DCP writes last, its metadata."""
    event = threading.Event()
    finish = dcp_files.FsspecWriter.finish

    def perhaps(*arguments: Any) -> None:
        if event.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        finish(*arguments)

    monkeypatch.setattr(dcp_files.FsspecWriter, "finish", perhaps)
    for module in (checkpointer, patience):
        monkeypatch.setattr(module, "RETRY_S", 0.2)
    return event


def slow(run: Any, full: threading.Event, between: range) -> Noted:
    """Steps that leave time to look, with a full disk between two of them."""
    run.trainer.events = noted = run.trainer.checkpoints._patience._events = Noted()
    report = run.trainer.report

    def tell(metrics: Any) -> None:
        report(metrics)
        if metrics.step == between.start:
            full.set()
        if metrics.step == between.stop:
            full.clear()
        time.sleep(0.02)

    run.trainer.report = tell
    return noted


@pytest.mark.long
def test_training_goes_on_and_saves_as_soon_as_there_is_room(
    start: Callable, full: threading.Event, tmp_path: Path
) -> None:
    whole = start("whole", steps=80)
    whole.trainer.fit()
    run = start(steps=80, checkpoint_every=25, keep_checkpoints=9)
    noted = slow(run, full, range(24, 35))
    run.trainer.fit()
    assert same_weights(run.model, whole.model)
    first, second, *rest = CheckpointStore(tmp_path / "checkpoints").steps()
    assert 25 < first < 50  # tried again before the next was due
    assert [second, *rest] == [50, 75, 80]
    assert noted.kinds == ["storage"]
    assert "step-000025: the checkpoint can't be written" in noted.entries[0]["cause"]
    # What was torn is gone: it took room.
    assert not (tmp_path / "checkpoints" / "step-000025").exists()


def test_the_last_checkpoint_is_waited_for(
    start: Callable, full: threading.Event, tmp_path: Path
) -> None:
    full.set()
    run = start()
    report = run.trainer.report

    def tell(metrics: Any) -> None:
        report(metrics)
        if metrics.last:
            threading.Timer(0.5, full.clear).start()

    run.trainer.report = tell
    run.trainer.fit()
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [10]


def test_a_disk_that_stays_full_ends_the_run_with_one_line(
    start: Callable, full: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "LONGEST_S", 0.3)
    full.set()
    run = start(steps=10_000, checkpoint_every=2)
    slow(run, full, range(-1, -1))
    line = r"step-0000\d\d: the checkpoint can't be written: .*No space left on device; the run "
    with pytest.raises(SharedError, match=line):
        run.trainer.fit()
    assert run.points[-1].step >= 2 * patience.MISSED


@pytest.mark.timeout(60)
def test_a_disk_that_is_full_at_the_end_holds_the_gpus_for_a_limited_time(
    start: Callable, full: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "LONGEST_S", 0.5)
    run = start(steps=10, checkpoint_every=100)
    full.set()
    with pytest.raises(SharedError, match=r"step-000010: the checkpoint can't be written"):
        run.trainer.fit()


def test_what_waiting_does_not_fix_ends_it_at_once(
    start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(dcp_files.FsspecWriter, "finish", refused)
    with pytest.raises(UserError, match="Permission denied"):
        start(steps=100).trainer.fit()


class FullStream(io.BytesIO):
    """A file on a disk that has room for what is small."""

    def write(self, data: Any) -> int:
        """No room for a tensor."""
        if len(data) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_is_known_behind_what_torch_makes_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def save(*_: Any) -> None:
        torch.save(torch.zeros(5000), FullStream())

    with pytest.raises(RuntimeError, match="unexpected pos"):
        save()
    monkeypatch.setattr(dcp_files.FsspecWriter, "write_data", save)
    writer = dcp_files.CheckpointWriter(str(tmp_path), lambda: None, lambda: None)
    with pytest.raises(OSError, match="No space left"):
        writer.write_data(None, None)  # type: ignore[arg-type]
