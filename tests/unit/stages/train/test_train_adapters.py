"""LoRA and QLoRA through the stage: adapters trained on a model of seconds before."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash
from pipelines.models.pretrained import load_pretrained
from pipelines.models.quantization import dequantize, quantize
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import TrainRecord, output_folder
from tests.unit.stages.train.test_train_stage import (
    RECIPE,
    VOCABULARY,
    cut_after,
    history,
    make_workspace,
    train_alone,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("base"))
    return output_folder(workspace, "train") / train_alone(workspace).model


def recipe(base: Path, **changes: dict[str, Any]) -> Recipe:
    values = RECIPE.to_dict() | {"model": {"init_from": str(base)}}
    values["adapter"] = {"kind": "lora", "rank": 4, "alpha": 8, "dropout": 0.1}
    values["train"] |= {"lr": 0.005}
    for section, keys in changes.items():
        values[section] |= keys
    return Recipe.model_validate(values)


def train_stage(recipe: Recipe, workspace: Path) -> tuple[TrainRecord, Path]:
    from pipelines.stages.train import train_stage

    record = train_stage.run(recipe, workspace)
    assert record is not None
    return record, output_folder(workspace, "train")


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model.eval()(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


def round_to_nf4(model: nn.Module) -> None:
    """The linear layers of the blocks, as training on them in NF4 sees them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            weight = module.weight.data
            module.weight.data = dequantize(quantize(weight), weight.shape, weight.dtype)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_what_comes_out_is_a_merged_model_and_the_adapter_beside_it(
    kind: str, base: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    before = folder_hash(base)
    record, output = train_stage(recipe(base, adapter={"kind": kind}), make_workspace(tmp_path))
    assert folder_hash(base) == before
    assert (record.model, record.adapter) == ("model", "adapter")
    assert record.parameters == AutoModelForCausalLM.from_pretrained(base).num_parameters()
    names = load_file(output / "model" / "model.safetensors").keys()
    assert names == load_file(base / "model.safetensors").keys()
    merged = logits(AutoModelForCausalLM.from_pretrained(output / "model"))
    with_adapter = AutoModelForCausalLM.from_pretrained(base)
    if kind == "qlora":
        round_to_nf4(with_adapter)
    with_adapter = PeftModel.from_pretrained(with_adapter, str(output / "adapter"))
    torch.testing.assert_close(merged, logits(with_adapter), atol=1e-5, rtol=1e-5)


def test_checkpoints_hold_adapters_only_and_a_cut_run_goes_on_to_the_bit(
    base: Path, tmp_path: Path
) -> None:
    from pipelines.stages.train import train_stage as stage

    whole, cut = make_workspace(tmp_path / "whole"), make_workspace(tmp_path / "cut")
    first, _ = train_stage(recipe(base), whole)
    with pytest.raises(InterruptedError):
        stage.run(recipe(base), cut, cut_after(5))
    second, _ = train_stage(recipe(base), cut)
    assert second == first
    newest = max((cut / "checkpoints").glob("step-*"))
    held = FileSystemReader(newest).read_metadata().state_dict_metadata.keys()
    weights = {name for name in held if re.search(r"layers\.\d+\.", name)}
    assert weights
    assert all(".lora_" in name for name in weights)
    assert not [name for name in held if "embed_tokens" in name]


def test_another_base_under_the_same_path_begins_anew(base: Path, tmp_path: Path) -> None:
    mine = tmp_path / "base"
    mine.mkdir()
    for path in base.iterdir():
        (mine / path.name).write_bytes(path.read_bytes())
    workspace = make_workspace(tmp_path / "work")
    first, _ = train_stage(recipe(mine), workspace)
    tensors = load_file(mine / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, mine / "model.safetensors", metadata={"format": "pt"})
    second, output = train_stage(recipe(mine), workspace)
    assert second.model_hash != first.model_hash
    other = load_pretrained(output / "model").state_dict()["norm.weight"]
    assert torch.equal(other, tensors["model.norm.weight"])


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_training_goes_on_from_an_adapter(kind: str, base: Path, tmp_path: Path) -> None:
    one, other = make_workspace(tmp_path / "one"), make_workspace(tmp_path / "other")
    _, output = train_stage(recipe(base, adapter={"kind": kind}), one)
    begun = {"kind": kind, "init_from": str(output / "adapter")}
    train_stage(recipe(base, adapter=begun), other)
    # The same samples a second time.
    losses, before = ([point["loss"] for point in history(each)] for each in (other, one))
    assert sum(losses) < sum(before) - 0.3


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": {"init_from": None}}, "random weights can't be adapted"),
        (
            {
                "parallel": {"pp": 2},
                "resources": {"workers": 2},
                "adapter": {"kind": "lora", "dropout": 0.1},
            },
            r"parallel.pp\(2\) \* tp\(1\): not with adapter.dropout",
        ),
        ({"train": {"precision": "fp8"}}, "train.precision = 'fp8'"),
        ({"adapter": {"init_from": "nowhere"}}, "nowhere: no adapter_config.json"),
        ({"adapter": {"kind": "none", "init_from": "x"}}, "there are no adapters"),
        ({"adapter": {"targets": ["c_attn"]}}, "no linear layer of this model is named 'c_attn'"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    changes: dict[str, Any], line: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=line) as error:
        train_stage(recipe(base, **changes), make_workspace(tmp_path))
    assert "\n" not in str(error.value)
