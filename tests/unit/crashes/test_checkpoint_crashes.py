"""A checkpoint that counts is whole, whatever write of claim, save and removal was the last."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, load, save

from pipelines.core.storage import MARKER
from pipelines.training.checkpoint.dcp_files import CheckpointReader, CheckpointWriter
from pipelines.training.checkpoint.store import CheckpointStore
from tests.unit.crashes.crash_points import crashes, every_point

STEPS = (1, 2)


def run(place, identity="a"):
    """As training does: claim, go on after the newest checkpoint, and save each step."""
    store = CheckpointStore(place)
    store.claim(identity)
    begun = max(store.steps(), default=0)
    for step in STEPS:
        if step > begun:
            save_step(store, step, identity)


def save_step(store, step, identity):
    def complete():
        facts = {"step": step, "seconds": 0.0, "loss": None, "others": {}}
        store.complete(step, facts)
        store.prune(1, False)

    writer = CheckpointWriter(store.url(step), lambda: store.remove(step), complete)
    save({"weight": weight(step, identity)}, storage_writer=writer, no_dist=True)


def weight(step, identity):
    return torch.full((64,), float(step + 100 * (identity == "b")))


def check(place, identity):
    """What counts can be read, and is this run's; returns the steps."""
    store = CheckpointStore(place)
    steps = store.steps()
    for step in steps:
        assert store.facts(step)["step"] == step
        found = {"weight": torch.zeros(64)}
        load(found, storage_reader=CheckpointReader(store.url(step)), no_dist=True)
        assert torch.equal(found["weight"], weight(step, identity))
    return steps


def no_crash_loses_a_step(tmp_path):
    newest = 0

    def one(stop):
        nonlocal newest
        place = tmp_path / str(stop)
        died = crashes(tmp_path, lambda: run(place), stop)
        steps = check(place, "a")
        assert max(steps, default=0) >= newest  # one more write never means less
        newest = max(steps, default=0)
        run(place)
        save_step(CheckpointStore(place), 3, "a")
        assert check(place, "a") == [3]
        names = {path.name for path in place.iterdir() if not path.name.startswith(".identity.")}
        assert names == {"identity", "step-000003"}
        return died

    return every_point(one)


def no_crash_mixes_two_runs(tmp_path):
    """Another run claims the place and dies; then either of the two claims it."""
    made = tmp_path / "made"
    run(made)

    def one(stop):
        for after in "ab":
            place = tmp_path / f"{stop}-{after}"
            shutil.copytree(made, place)
            died = crashes(tmp_path, lambda: CheckpointStore(place).claim("b"), stop)  # noqa: B023
            CheckpointStore(place).claim(after)
            check(place, after)
        return died

    return every_point(one)


def no_crash_tears_a_copy(tmp_path):
    made = tmp_path / "made"
    run(made)

    def one(stop):
        place = tmp_path / str(stop)

        def copy():
            to = CheckpointStore(place)
            to.claim("a")
            CheckpointStore(made).copy(2, to)
            to.prune(1, False)

        died = crashes(tmp_path, copy, stop)
        check(place, "a")
        copy()
        assert check(place, "a") == [2]
        return died

    return every_point(one)


def test_every_crash_of_a_run_leaves_whole_checkpoints_and_the_newest(tmp_path):
    assert no_crash_loses_a_step(tmp_path) > 20


def test_every_crash_of_a_claim_keeps_two_runs_apart(tmp_path):
    assert no_crash_mixes_two_runs(tmp_path) > 5


def test_every_crash_of_a_copy_leaves_it_whole_or_uncounted(tmp_path):
    assert no_crash_tears_a_copy(tmp_path) > 5


def test_a_copy_whose_marker_comes_first_is_caught(tmp_path, monkeypatch):
    def marker_first(self, step, to):
        folder = Path(self.url(step))
        to.remove(step)
        to._place.make(folder.name)
        for path in sorted(folder.iterdir(), key=lambda path: path.name != MARKER):
            to._place.put(path, f"{folder.name}/{path.name}")

    monkeypatch.setattr(CheckpointStore, "copy", marker_first)
    with pytest.raises(CheckpointException, match=r"missing|metadata"):
        no_crash_tears_a_copy(tmp_path)


def test_a_marker_before_the_files_is_caught(tmp_path, monkeypatch):
    finish = CheckpointWriter.finish

    def marker_first(self, metadata, results):
        self._complete()
        self._complete = lambda: None
        finish(self, metadata, results)

    monkeypatch.setattr(CheckpointWriter, "finish", marker_first)
    with pytest.raises(CheckpointException, match="metadata"):
        no_crash_loses_a_step(tmp_path)


def marker_last(store):
    """What a folder's own order of names may lead to."""
    for step in store._all():
        folder = Path(store.url(step))
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MARKER):
            path.unlink()
        folder.rmdir()


def test_files_that_go_before_their_marker_are_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(CheckpointStore, "clear", marker_last)
    with pytest.raises(CheckpointException, match="missing"):
        no_crash_mixes_two_runs(tmp_path)
