import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash, read_json
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import override_values
from pipelines.run.logbook import read_logbook
from pipelines.run.records import output_folder
from pipelines.stages.train.layout_file import LayoutFile
from tests.unit.stages.train.test_train_stage import RECIPE, history, make_workspace

ONE = {"resources.workers": 1}
FREE = {"parallel": "auto", "train.micro_batch_size": "auto"}


def recipe(**overrides: Any) -> Recipe:
    return override_values(RECIPE, overrides)


def train(workspace: Path, chosen: Recipe, fails_at: int | None = None) -> Any:
    from pipelines.stages.train import train_stage as stage

    def report(metrics: Any) -> None:
        if metrics.step == fails_at:
            raise torch.OutOfMemoryError

    return stage.run(chosen, workspace, report)


def test_what_the_rule_takes_equals_the_same_by_hand(tmp_path: Path) -> None:
    ruled, by_hand = make_workspace(tmp_path / "ruled"), make_workspace(tmp_path / "by hand")
    record = train(ruled, recipe(**FREE))
    assert record.layout["train.micro_batch_size"] == 2  # of 6 samples: a power of two
    assert train(by_hand, recipe(**record.layout, **ONE)) == record
    assert len({folder_hash(output_folder(each, "train")) for each in (ruled, by_hand)}) == 1


def test_memory_that_ran_out_means_the_next_layout_from_the_last_checkpoint(tmp_path: Path) -> None:
    cut, whole = make_workspace(tmp_path / "cut"), make_workspace(tmp_path / "whole")
    with pytest.raises(torch.OutOfMemoryError):
        train(cut, recipe(**FREE), fails_at=3)
    record = train(cut, recipe(**FREE))
    assert record.layout["train.micro_batch_size"] == 1
    assert read_json(cut / "layout.json")["too_much"].keys() == {"1"}
    train(whole, recipe(**FREE))
    losses = [[point["loss"] for point in history(each)] for each in (cut, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    with pytest.raises(torch.OutOfMemoryError):
        train(anew(cut), recipe(**FREE), fails_at=3)
    with pytest.raises(UserError, match="no layout of 1 processes fits"):
        train(cut, recipe(**FREE))


@pytest.mark.parametrize("by_rule", [{}, FREE], ids=["by hand", "auto"])
def test_a_machine_that_ran_out_of_memory_gets_half_the_micro_batch(
    tmp_path: Path, by_rule: dict[str, str]
) -> None:
    """The driver of the Ray job says so, as the process that trained was ended."""
    cut, whole = make_workspace(tmp_path / "cut"), make_workspace(tmp_path / "whole")
    with pytest.raises(torch.OutOfMemoryError if by_rule else UserError):
        train(cut, recipe(**by_rule), fails_at=3)
    forget_device(cut)
    assert LayoutFile(cut, recipe(**by_rule)).halve_micro_batch() == 1
    assert train(cut, recipe(**by_rule)).layout["train.micro_batch_size"] == 1
    changes = [each.done for each in read_logbook(cut) if each.kind == "layout change"]
    assert changes == ["train.micro_batch_size: 2 → 1"]
    assert train(whole, recipe(**by_rule)).layout["train.micro_batch_size"] == 2
    mine, theirs = history(cut), history(whole)
    assert [point["samples"] for point in mine] == [point["samples"] for point in theirs]
    losses = [[point["loss"] for point in points] for points in (mine, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert LayoutFile(cut, recipe(**by_rule)).halve_micro_batch() is None


def forget_device(workspace: Path) -> None:
    """What the test took for a death was a shortage of a device's own memory."""
    path = workspace / "layout.json"
    path.write_text(json.dumps(read_json(path) | {"too_much": {}}))


def anew(workspace: Path) -> Path:
    """As it was before training, but for what is known of its memory."""
    shutil.rmtree(workspace / "checkpoints")
    return workspace


def test_a_layout_by_hand_is_not_changed_but_advised(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "w")
    with pytest.raises(UserError, match=r"out of memory with .*micro_batch_size 2.*would take"):
        train(workspace, recipe(), fails_at=2)
    start, ran_out = read_logbook(workspace)
    assert (start.kind, ran_out.kind) == ("start", "out of memory")
    assert "would take" in ran_out.done


def test_memory_that_runs_out_as_the_model_is_made_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines.stages.train import train_stage as stage

    def too_large(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(stage, "parallelize", too_large)
    with pytest.raises(UserError, match=r"out of memory with .*micro_batch_size 2.*would take"):
        train(make_workspace(tmp_path / "w"), recipe())


def test_the_layout_is_told_to_mlflow(tmp_path: Path, mlflow_client: Any, mlflow_run: str) -> None:
    workspace = make_workspace(tmp_path / "w")
    (workspace / "run.json").write_text(json.dumps({"mlflow_run_id": mlflow_run}))
    record = train(workspace, recipe(**FREE))
    tags = mlflow_client.get_run(mlflow_run).data.tags
    assert json.loads(tags["penstock.layout"]) == record.layout
