"""Which earlier run a new one is compared with, and how much of a long history is read for that."""

import os
from pathlib import Path

import pytest

from pipelines.stage_cache.explanation import earlier_run, recipe_name

STAGE = "train"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def make(runs: Path, number: int, recipe: str, done: tuple[str, ...] = (STAGE,)) -> Path:
    """A run that began at that second."""
    workspace = runs / f"run-{number}"
    workspace.mkdir(parents=True)
    (workspace / "run.json").write_text("{}")
    os.utime(workspace / "run.json", (number, number))
    (workspace / "params.yaml").write_text(f"name: {recipe}\ndata:\n  name: another\n")
    (workspace / "dvc.lock").write_text("stages:\n" + "".join(f"  {each}:\n" for each in done))
    return workspace


def test_the_newest_of_the_same_recipe_counts_or_else_the_newest(runs: Path) -> None:
    other = make(runs, 1, "other")
    same = make(runs, 2, "this")
    newer = make(runs, 3, "other")
    make(runs, 4, "this", done=("preprocess",))
    now = make(runs, 5, "this")
    make(runs, 6, "this")
    assert earlier_run(now, runs, STAGE) == same
    (same / "params.yaml").write_text("name: 'other'\n")
    assert earlier_run(now, runs, STAGE) == newer
    (newer / "dvc.lock").write_text("stages:\n  preprocess:\n")
    assert earlier_run(now, runs, STAGE) == same
    (same / "dvc.lock").unlink()
    assert earlier_run(now, runs, STAGE) == other
    assert earlier_run(other, runs, STAGE) is None


@pytest.mark.parametrize(
    ("line", "name"), [("name: 'a: b'", "a: b"), ("name: null", None), ("seed: 1", None)]
)
def test_the_recipes_name_is_read_as_yaml(runs: Path, line: str, name: str | None) -> None:
    workspace = make(runs, 1, "x")
    (workspace / "params.yaml").write_text(f"data:\n  name: data\n{line}\n")
    assert recipe_name(workspace) == name


def test_of_many_runs_a_few_are_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        make(runs, number, "this")
    now = make(runs, 300, "this")
    read = []
    text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, **said: (read.append(path), text(path, **said))[1]
    )
    assert earlier_run(now, runs, STAGE) == runs / "run-299"
    assert len(read) == 3
