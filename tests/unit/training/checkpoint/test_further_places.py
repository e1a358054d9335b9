"""Checkpoints are copied to further places by their policies, and a run goes on from there."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.core.errors import UserError
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import with_absolute_paths
from pipelines.training.checkpoint import further_places as module
from pipelines.training.checkpoint import store as checkpoint_store
from pipelines.training.checkpoint.further_places import FurtherPlace, further_places
from pipelines.training.checkpoint.store import CheckpointStore
from tests.unit.training.conftest import Noted
from tests.unit.training.test_trainer import same_weights


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)


def copies(
    run: Any, place: str | Path, every: int = 1, keep: int = 1, identity: str = "run"
) -> FurtherPlace:
    """One more place of the run's, which claims its first one as the stage does."""
    source = run.trainer.checkpoints._store
    source.claim(identity)
    further = FurtherPlace(str(place), source, every, keep, Noted())
    run.trainer.checkpoints.further = (*run.trainer.checkpoints.further, further)
    return further


def settle(run: Any) -> None:
    """Wait for the last save, and for its copies: their times do not decide which are due."""
    run.trainer.checkpoints.wait()
    end = time.monotonic() + 60
    while any(each._works and not each._fails for each in run.trainer.checkpoints.further):
        assert time.monotonic() < end
        time.sleep(0.001)


def at_each_step(run: Any, act: Callable[[int], object] = lambda step: None) -> None:
    report = run.trainer.report

    def tell(metrics: Any) -> None:
        settle(run)
        act(metrics.step)
        report(metrics)

    run.trainer.report = tell


def cut_off(run: Any, after: int) -> None:
    """So many steps, and the copies of their checkpoints."""

    def perhaps(step: int) -> None:
        if step == after:
            raise InterruptedError

    at_each_step(run, perhaps)
    with pytest.raises(InterruptedError):
        run.trainer.fit()


def finish(run: Any) -> None:
    run.trainer.fit()
    run.trainer.checkpoints.finish_further()


def test_each_place_has_the_copies_of_its_policy(start: Callable, place: str) -> None:
    run = start(checkpoint_every=1, keep_checkpoints=1)
    every = copies(run, f"{place}/every", every=1, keep=3)
    fourth = copies(run, f"{place}/fourth", every=4, keep=1)
    at_each_step(run)
    finish(run)
    assert run.trainer.checkpoints._store.steps() == [10]
    assert every.store.steps() == [8, 9, 10]
    assert fourth.store.steps() == [8]
    assert not every._events.kinds
    assert not fourth._events.kinds


def test_a_run_that_lost_its_disk_goes_on_from_a_copy_to_the_same_bits(
    start: Callable, tmp_path: Path, place: str
) -> None:
    whole = start("whole")
    whole.trainer.fit()
    first = start("cut", checkpoint_every=2)
    copies(first, place)
    cut_off(first, after=7)
    shutil.rmtree(tmp_path / "cut")
    second = start("cut", checkpoint_every=2)
    copies(second, place)
    finish(second)
    assert [(p.step, p.loss, p.gradient_norm) for p in second.points] == [
        (p.step, p.loss, p.gradient_norm) for p in whole.points[6:]
    ]
    assert same_weights(whole.model, second.model)


def test_the_newest_of_all_places_counts(start: Callable, tmp_path: Path) -> None:
    first = start(checkpoint_every=2, keep_checkpoints=9)
    further = copies(first, tmp_path / "further", every=5)
    cut_off(first, after=9)
    assert further.store.steps() == [6]
    for lost, goes_on_after in ((), 8), ((8,), 6), ((6, 8), 6):
        for step in lost:
            first.trainer.checkpoints._store.remove(step)
        again = start(checkpoint_every=100)
        copies(again, tmp_path / "further", every=5)
        cut_off(again, after=9)
        assert again.trainer.checkpoints.newest == goes_on_after


def test_copies_of_another_run_are_deleted_and_not_taken(start: Callable, tmp_path: Path) -> None:
    first = start("first", checkpoint_every=2)
    copies(first, tmp_path / "further")
    cut_off(first, after=7)
    second = start("second", checkpoint_every=4)
    further = copies(second, tmp_path / "further", identity="another run")
    at_each_step(second)
    finish(second)
    assert second.points[0].step == 1
    assert further.store.steps() == [10]


def test_a_place_that_is_away_is_told_once_and_tried_again(start: Callable, tmp_path: Path) -> None:
    whole = start("whole", checkpoint_every=1)
    whole.trainer.fit()
    run = start(checkpoint_every=1)
    place = tmp_path / "disk"
    further = copies(run, place / "run")

    def away_for_three_steps(step: int) -> None:
        if step == 3:
            place.rename(tmp_path / "away")
            place.write_text("a file where the folder should be")
        if step == 6:
            place.unlink()
            (tmp_path / "away").rename(place)
            while further._fails:
                time.sleep(0.01)

    at_each_step(run, away_for_three_steps)
    finish(run)
    assert same_weights(run.model, whole.model)
    assert further._events.kinds == ["storage"]
    assert "disk/run: no checkpoint can be copied there: " in further._events.entries[0]["cause"]
    assert further.store.steps() == [10]


def test_a_run_whose_further_place_is_away_goes_on_from_its_own_disk(
    start: Callable, tmp_path: Path
) -> None:
    first = start(checkpoint_every=2)
    copies(first, tmp_path / "further")
    cut_off(first, after=7)
    shutil.rmtree(tmp_path / "further")
    (tmp_path / "further").write_text("a file where the folder should be")
    second = start(checkpoint_every=2)
    copies(second, tmp_path / "further")
    cut_off(second, after=9)
    assert second.points[0].step == 7
    shutil.rmtree(tmp_path / "checkpoints")
    third = start(checkpoint_every=2)
    copies(third, tmp_path / "further")
    with pytest.raises(UserError, match="further: "):
        third.trainer.fit()


def test_a_run_does_not_wait_for_ever_for_a_place_that_stays_away(
    start: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise OSError("away")

    monkeypatch.setattr(module, "LONGEST_S", 0.2)
    monkeypatch.setattr(checkpoint_store._Folder, "make", away)
    run = start(steps=4)
    further = copies(run, tmp_path / "further")
    finish(run)
    assert [each["done"] for each in further._events.entries] == [
        "training goes on, and it is tried again every 0.05 s",
        "given up",
    ]


def test_a_full_place_keeps_no_part_of_a_copy(
    start: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = checkpoint_store._Folder.put

    def full(self: Any, path: Path, name: str) -> None:
        put(self, path, name)
        raise OSError(28, "No space left on device")

    run = start(checkpoint_every=4)
    further = copies(run, tmp_path / "further")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_store._Folder, "put", full)
        cut_off(run, after=9)
        assert further._fails
        assert {path.name for path in (tmp_path / "further").iterdir()} == {"identity"}
    assert "No space left" in further._events.entries[0]["cause"]


def test_what_was_cut_off_is_copied_by_the_next_try(start: Callable, tmp_path: Path) -> None:
    first = start(checkpoint_every=4)
    first.trainer.checkpoints._store.claim("run")
    cut_off(first, after=7)
    second = start(checkpoint_every=100)
    further = copies(second, tmp_path / "further")
    cut_off(second, after=6)
    assert further.store.steps() == [4]


def test_what_is_being_copied_is_kept_until_it_is_copied(
    start: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    put = checkpoint_store._Folder.put

    def slowly(self: Any, path: Path, name: str) -> None:
        assert opened.wait(60)
        put(self, path, name)

    monkeypatch.setattr(checkpoint_store._Folder, "put", slowly)
    run = start(checkpoint_every=2, keep_checkpoints=1)
    further = copies(run, tmp_path / "further", keep=9)
    report = run.trainer.report
    kept = []

    def tell(metrics: Any) -> None:
        report(metrics)
        run.trainer.checkpoints.wait()
        kept.append(run.trainer.checkpoints._store.steps())

    run.trainer.report = tell
    run.trainer.fit()
    opened.set()
    run.trainer.checkpoints.finish_further()
    assert kept[-1] == [2, 8]
    assert further.store.steps() == [2, 10]  # the run waited for both
    assert run.trainer.checkpoints._store.steps() == [10]


def test_a_copy_that_another_process_removes_meanwhile_does_not_count(
    start: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the next try does while this one's machine is cut off."""
    run = start(steps=4)
    run.trainer.fit()
    source = run.trainer.checkpoints._store
    to = CheckpointStore(tmp_path / "further")
    to.claim("run")
    put = checkpoint_store._Folder.put
    removed = []

    def meanwhile(self: Any, path: Path, name: str) -> None:
        put(self, path, name)
        if not removed:
            removed.append(name)
            (tmp_path / "further" / name).unlink()

    monkeypatch.setattr(checkpoint_store._Folder, "put", meanwhile)
    with pytest.raises(UserError, match="was removed while it was copied"):
        source.copy(4, to)
    assert to.steps() == []


def test_no_place_is_copied_onto_itself(start: Callable, tmp_path: Path) -> None:
    run = start(steps=4)
    run.trainer.fit()
    (tmp_path / "link").symlink_to(tmp_path / "checkpoints")
    source = run.trainer.checkpoints._store
    with pytest.raises(UserError, match="is where the checkpoints lie already"):
        source.copy(4, CheckpointStore(tmp_path / "link"))
    assert source.steps() == [4]


def test_the_recipe_names_the_places_in_which_each_run_has_a_folder(tmp_path: Path) -> None:
    more = [{"place": "s3://bucket/runs/", "every": 500, "keep": 2}, {"place": "slow"}]
    recipe = Recipe.model_validate({"name": "t", "train": {"more_checkpoints": more}})
    found = further_places(with_absolute_paths(recipe, tmp_path), tmp_path / "run", Noted())
    assert [each.store.url(1) for each in found] == [
        "s3://bucket/runs/run/step-000001",
        f"{tmp_path}/slow/run/step-000001",
    ]


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ({"more_checkpoints": [{"place": "gs://b"}]}, "place must be a folder or an s3:// URL"),
        (
            {"checkpoints": "s3://bucket/a", "more_checkpoints": [{"place": "/mnt/slow"}]},
            "copied from a folder, but checkpoints is s3://bucket/a; name a folder",
        ),
        (
            {"checkpoints": "/mnt/slow", "more_checkpoints": [{"place": "/mnt//slow/"}]},
            "/mnt/slow is named twice",
        ),
        (
            {"more_checkpoints": [{"place": "s3://bucket/a"}, {"place": "s3://bucket/a/"}]},
            "s3://bucket/a is named twice",
        ),
    ],
)
def test_a_place_that_can_have_no_copies_is_refused(train: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Recipe.model_validate({"name": "t", "train": train})
