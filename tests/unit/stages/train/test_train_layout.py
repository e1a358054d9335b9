import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash, read_json
from pipelines.planning.precision_rule import Device
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import override_values
from pipelines.run.logbook import read_logbook
from pipelines.run.records import TrainRecord, output_folder
from pipelines.stages.standalone import Job, open_workspace
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


CPU, GPU = Device(is_cpu=True, has_bf16=False), Device(is_cpu=False, has_bf16=True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], None]:
    """Let the rule see another device than this machine's."""
    from pipelines.stages.train import train_layout

    return lambda device: monkeypatch.setattr(train_layout, "properties", lambda _: device)


def test_on_a_cpu_auto_is_what_it_was_before(tmp_path: Path) -> None:
    auto, by_hand = make_workspace(tmp_path / "auto"), make_workspace(tmp_path / "by hand")
    record = train(auto, recipe())
    assert (record.layout["train.precision"], record.layout["train.compile"]) == ("fp32", False)
    assert record.layout["train.attention"] == "flex"
    assert read_json(auto / "layout.json")["flash_attention"] is None
    assert record == TrainRecord.read(auto)
    assert read_json(auto / "layout.json")["layout"] == record.layout
    assert train(by_hand, recipe(**{"train.precision": "fp32", "train.compile": False})) == record
    assert len({folder_hash(output_folder(each, "train")) for each in (auto, by_hand)}) == 1


def test_varlen_attn_is_refused_on_a_cpu(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "w")
    varlen = {"train.attention": "varlen", "data.document_mask": True}
    with pytest.raises(UserError, match=r"takes bf16 and fp16, but train\.precision is fp32"):
        train(workspace, recipe(**varlen))
    with pytest.raises(UserError, match=r"attention = varlen: .* this process has cpu; set flex"):
        train(workspace, recipe(**varlen, **{"train.precision": "bf16"}))
    assert not (workspace / "layout.json").exists()


@pytest.mark.parametrize(("began", "then"), [(GPU, CPU), (CPU, GPU)], ids=["on a GPU", "on a CPU"])
def test_a_run_goes_on_as_it_began_on_a_device_of_another_kind(
    began: Device, then: Device, tmp_path: Path, machine: Callable[[Device], None]
) -> None:
    """To the bit; both are this CPU, which has bf16 too. Compiled, it would need a linker."""
    eager = recipe(**{"train.compile": False})
    whole, cut = make_workspace(tmp_path / "whole"), make_workspace(tmp_path / "cut")
    machine(began)
    record = train(whole, eager)
    assert record.layout["train.precision"] == ("bf16" if began is GPU else "fp32")
    with pytest.raises(UserError, match="out of memory"):
        train(cut, eager, fails_at=3)
    machine(then)
    assert train(cut, eager) == record
    assert history(cut) == history(whole)
    assert "resume" in [each.kind for each in read_logbook(cut)]
    assert not [each for each in read_logbook(cut) if each.kind == "layout change"]


def test_a_job_that_begins_anew_takes_what_the_device_has(
    tmp_path: Path, machine: Callable[[Device], None]
) -> None:
    small = {"train.compile": False, "data.source.max_documents": 1}
    job = Job(recipe(**small), make_workspace(tmp_path / "w"))
    found = []
    for device in (GPU, CPU):
        machine(device)
        with open_workspace(job) as workspace:
            found.append(train(workspace, job.recipe).layout["train.precision"])
    assert found == ["bf16", "fp32"]


def test_the_devices_of_a_run_share_the_least(tmp_path: Path) -> None:
    from pipelines.stages.train.train_layout import least_of

    old = Device(is_cpu=False, has_bf16=False)
    assert least_of([GPU, old, GPU]) is old
    assert least_of([GPU, GPU]) is GPU
    assert least_of([CPU]) is CPU


def test_a_recipe_that_is_not_settled_does_not_reach_the_engine(tmp_path: Path) -> None:
    from pipelines.models.transformer import Transformer
    from pipelines.parallel.layout import Layout
    from pipelines.parallel.mesh import build_mesh
    from pipelines.parallel.parallelize import parallelize
    from pipelines.training.checkpoint.state import identity
    from tests.unit.training.checkpoint.test_checkpointer import DATASET
    from tests.unit.training.conftest import SHAPE

    mesh = build_mesh(Layout(), torch.device("cpu"))
    with pytest.raises(ValueError, match="compile: auto is resolved"):
        parallelize(Transformer(SHAPE), mesh, recipe())
    with pytest.raises(ValueError, match="precision: auto is resolved"):
        identity(recipe(), DATASET)
