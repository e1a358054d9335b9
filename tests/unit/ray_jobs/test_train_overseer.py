"""How many failures are forgiven."""

from pathlib import Path

import pytest

from pipelines.recipe.recipe_files import load_recipe
from pipelines.training.checkpoint.store import CheckpointStore
from ray_jobs.train_overseer import FRUITLESS, FruitlessError, Progress, _answers


def save(workspace: Path, step: int) -> None:
    """A complete checkpoint, as far as its place shows."""
    folder = workspace / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    CheckpointStore(workspace / "checkpoints").complete(step, {})


def test_a_run_that_gets_on_may_fail_without_end(tmp_path: Path) -> None:
    progress = Progress(load_recipe("debug"), tmp_path)
    for step in range(1, 20):
        progress.failed("a worker died")
        progress.failed("a worker died")
        save(tmp_path, step)


def test_one_that_does_not_is_given_up(tmp_path: Path) -> None:
    save(tmp_path, 7)
    progress = Progress(load_recipe("debug"), tmp_path)
    for _ in range(FRUITLESS - 1):
        progress.failed("a worker died")
    torn = tmp_path / "checkpoints" / "step-000009"
    torn.mkdir()
    line = "3 failures without a new checkpoint since step 7; the last: the same again"
    with pytest.raises(FruitlessError, match=line):
        progress.failed("the same again")


def test_a_node_that_refuses_or_is_not_there_does_not_answer() -> None:
    assert not _answers("127.0.0.1", 9)
