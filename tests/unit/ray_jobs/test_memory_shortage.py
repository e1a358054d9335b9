"""What the try after a shortage takes, and when it begins."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_recipe
from pipelines.run.logbook import read_logbook
from pipelines.run.progress import ProgressWriter, last_progress
from pipelines.stages.train.layout_file import LayoutFile
from pipelines.training.preemption import PreemptedError
from ray_jobs import memory_shortage, notice
from ray_jobs.memory_shortage import MemoryShortage
from ray_jobs.train_overseer import FruitlessError, HostOutOfMemoryError
from tests.unit.ray_jobs.test_train_overseer import save

SHORT = HostOutOfMemoryError("192.0.2.2 had 9GB of 10GB in use, and Ray ended workers")


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_shortage, "PAUSES_S", (0.0, 0.1, 0.2))
    monkeypatch.setattr(memory_shortage, "LONGEST_S", 0.6)


def recipe() -> Recipe:
    return load_recipe("debug")


def tried(workspace: Path, run: Recipe, micro_batch: int) -> None:
    """A try takes this much, as the train stage writes it."""
    LayoutFile(workspace, run).write(layout={"train.micro_batch_size": micro_batch})


def met(shortage: MemoryShortage, workspace: Path) -> str:
    """What is done about one more shortage."""
    before = len(read_logbook(workspace))
    shortage.met(f"try {before}", SHORT)
    *_, entry = entries = read_logbook(workspace)
    assert len(entries) == before + 1
    assert (entry.kind, entry.stage, entry.cause) == ("out of memory", "train", str(SHORT))
    return entry.done


def test_each_try_takes_half_of_what_the_last_one_took(tmp_path: Path) -> None:
    shortage = MemoryShortage(recipe(), tmp_path, on_gpus=False)
    assert met(shortage, tmp_path) == "the next try takes as much as this one"  # it died early
    tried(tmp_path, recipe(), 6)
    save(tmp_path, 10)
    assert met(shortage, tmp_path) == "the next try takes micro-batches of 3"
    # The next one dies before it has taken anything, so less would not have helped it.
    assert met(shortage, tmp_path).startswith("the next try takes as much as this one, ")
    for took, then in ((3, "micro-batches of 1"), (1, "as much as this one")):
        tried(tmp_path, recipe(), took)
        save(tmp_path, 20 - took)
        assert met(shortage, tmp_path) == f"the next try takes {then}"
    assert LayoutFile(tmp_path, recipe()).read()["most_samples"] == 1
    assert LayoutFile(tmp_path, load_recipe("debug", ["seed=9"])).read() == {}


def test_on_gpus_a_micro_batch_takes_none_of_the_machines_memory(tmp_path: Path) -> None:
    tried(tmp_path, recipe(), 8)
    shortage = MemoryShortage(recipe(), tmp_path, on_gpus=True)
    assert met(shortage, tmp_path) == "the next try takes as much as this one"
    assert "most_samples" not in LayoutFile(tmp_path, recipe()).read()


def test_it_waits_longer_each_time_and_gives_up_unless_the_run_gets_on(tmp_path: Path) -> None:
    shortage = MemoryShortage(recipe(), tmp_path, on_gpus=True)
    for _ in range(2):
        assert [met(shortage, tmp_path).partition(", ")[2] for _ in range(4)] == [
            "",
            "0 s later",
            "0 s later",
            "0 s later",
        ]
        save(tmp_path, len(read_logbook(tmp_path)))
    for _ in range(4):
        met(shortage, tmp_path)
    line = "out of memory 5 times without a new checkpoint, .*free memory.*; the last: 192.0.2.2"
    with pytest.raises(FruitlessError, match=line):
        met(shortage, tmp_path)


def test_a_wait_is_told_in_the_progress_and_ends_where_the_job_is_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_shortage, "PAUSES_S", (30.0,))
    monkeypatch.setattr(memory_shortage, "LONGEST_S", 600.0)
    progress = ProgressWriter(tmp_path, "train", interval=0)
    progress.write(10, 100, "steps")
    progress.write(60, 100, "steps")
    before: Any = last_progress(tmp_path, "train")
    with notice.listening_for_notice(), pytest.raises(PreemptedError):
        os.kill(os.getpid(), signal.SIGUSR1)
        met(MemoryShortage(recipe(), tmp_path, on_gpus=True), tmp_path)
    told: Any = last_progress(tmp_path, "train")
    assert (told.done, told.rate) == (before.done, before.rate)
    assert told.line().endswith("steps/s, waits 30 s for memory")
    (entry,) = read_logbook(tmp_path)
    assert entry.done == "the next try takes as much as this one, 30 s later"
