"""Sound folders of every family pass, and each planted fault is refused by its name."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.evaluation.served_weights import Adapter, check_weights
from pipelines.loading.dataloader import IGNORED
from pipelines.models import pretrained
from pipelines.models.check_batch import CheckBatch
from pipelines.models.config import DecoderConfig
from pipelines.models.lora import adapted_layers, add_adapters, chosen_sizes, init_adapters
from pipelines.models.peft_format import save_adapter
from pipelines.models.pretrained import load_pretrained, save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.recipe.training_section import Adapter as AdapterRecipe
from tests.unit.models.test_families import CONTEXT, SHAPES, VOCABULARY, random_model

TIED = DecoderConfig(**vars(SHAPES["qwen2"]))
UNTIED = SHAPES["llama2"]


@dataclass
class Written:
    """A folder, the loss of the model that was written, and its adapter if it has one."""

    folder: Path
    batch: CheckBatch
    adapter: Adapter | None = None

    def failing(self) -> set[str]:
        found = check_weights(self.folder, self.batch, self.adapter)
        return {each.name for each in found if not each.holds}

    @property
    def weights(self) -> Path:
        return self.folder / "model.safetensors"


def batch_of(model: Transformer, precision: str = "fp32") -> CheckBatch:
    """What training measures before it writes."""
    drawn = torch.randint(VOCABULARY, (3, CONTEXT + 1), generator=torch.Generator().manual_seed(2))
    inputs, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    targets[0, :9] = IGNORED
    with torch.no_grad():
        nats = model(inputs, targets_BS=targets).item()
    return CheckBatch(inputs, targets, nats, precision, CONTEXT)


def write(config: DecoderConfig, folder: Path) -> Written:
    model = random_model(config)
    save_pretrained(model, folder / "model")
    return Written(folder / "model", batch_of(model))


def write_adapted(config: DecoderConfig, folder: Path, kind: str = "lora") -> Written:
    save_pretrained(random_model(config), folder / "base")
    model = load_pretrained(folder / "base").eval()
    recipe = AdapterRecipe(kind=kind, rank=4, alpha=8)  # type: ignore[arg-type]
    add_adapters(model, chosen_sizes(model, recipe), recipe)
    if kind == "qlora":  # the layers are NF4 now, and empty
        model.to_empty(device="cpu")
        pretrained.load_weights(model, folder / "base")
    init_adapters(model, seed=1)
    for number, layer in enumerate(adapted_layers(model).values()):
        layer.lora_b.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
    batch = batch_of(model)
    save_pretrained(model, folder / "model")
    save_adapter(model, folder / "adapter")
    adapter = Adapter(folder / "adapter", folder / "base", in_nf4=kind == "qlora")
    return Written(folder / "model", batch, adapter)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sound_folder_passes(shape: str, tmp_path: Path) -> None:
    assert write(SHAPES[shape], tmp_path).failing() == set()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sound_adapter_passes(shape: str, tmp_path: Path) -> None:
    assert write_adapted(SHAPES[shape], tmp_path).failing() == set()


@pytest.mark.parametrize(
    "shape", ["llama2", "llama3", "mistral-full", "qwen2", "qwen3", "phi3", "gemma3"]
)
def test_a_sound_adapter_on_a_base_in_4_bits_passes(shape: str, tmp_path: Path) -> None:
    assert write_adapted(SHAPES[shape], tmp_path, "qlora").failing() == set()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sound_folder_in_bfloat16_passes(shape: str, tmp_path: Path) -> None:
    model = random_model(SHAPES[shape])
    for parameter in model.parameters():
        parameter.data.mul_(0.5)  # as losses of trained models are, not of random ones
    batch = batch_of(model, "bf16")
    save_pretrained(model.to(torch.bfloat16), tmp_path)
    assert Written(tmp_path, batch).failing() == set()


def test_a_folder_in_several_files_passes_and_a_run_of_an_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "FILE_BYTES", 20_000)
    written = write(UNTIED, tmp_path)
    assert len(list(written.folder.glob("*.safetensors"))) > 2
    assert written.failing() == set()
    names = [each.name for each in check_weights(written.folder, None, None)]
    assert names == ["files", "data type"]


def test_sequences_without_targets_are_compared_with_nothing(tmp_path: Path) -> None:
    written = write(UNTIED, tmp_path)
    written.batch.targets_BS[:] = IGNORED
    *_, last = check_weights(written.folder, written.batch, None)
    assert (last.name, last.holds) == ("trained weights", True)
    assert "not compared" in last.found


def tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[Written], None]:
    """A fault in the weights."""

    def plant(written: Written) -> None:
        found = load_file(written.weights)
        change(found)
        save_file({k: v.contiguous() for k, v in found.items()}, written.weights, {"format": "pt"})

    return plant


def config(**changes: Any) -> Callable[[Written], None]:
    """A fault in config.json."""

    def plant(written: Written) -> None:
        path = written.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return plant


def _transpose(found: dict[str, Any]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"  # a square one
    found[name] = found[name].T


def _swap_layers(found: dict[str, Any]) -> None:
    for name in [name for name in found if ".layers.0." in name]:
        other = name.replace(".layers.0.", ".layers.1.")
        found[name], found[other] = found[other], found[name]


def _interleave(found: dict[str, Any]) -> None:
    """Rotary pairs as GPT-J has them, in a family that has halves."""
    for kind in ("q_proj", "k_proj"):
        name = f"model.layers.0.self_attn.{kind}.weight"
        heads = found[name].unflatten(0, (-1, 2, 4))
        found[name] = heads.transpose(1, 2).flatten(0, 2)


def _rename(found: dict[str, Any]) -> None:
    found["model.normal.weight"] = found.pop("model.norm.weight")


def _forget_half_a_token(found: dict[str, Any]) -> None:
    found["model.embed_tokens.weight"][3, :16] = 0


def _one_nan(found: dict[str, Any]) -> None:
    found["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan


def _rescale_norm(found: dict[str, Any]) -> None:
    found["model.norm.weight"] *= 1.01


def _truncate(written: Written) -> None:
    written.weights.write_bytes(written.weights.read_bytes()[:-100])


def _lose_a_file(written: Written) -> None:
    names = sorted(load_file(written.weights))
    parts = [{n: load_file(written.weights)[n] for n in names[k::2]} for k in (0, 1)]
    files = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    index = {name: file for part, file in zip(parts, files, strict=True) for name in part}
    save_file(parts[0], written.folder / files[0], {"format": "pt"})
    written.weights.unlink()
    path = written.folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))


ROPE = {"rope_theta": 500_000.0, "rope_type": "default"}
FAULTS = {
    "a transposed weight": (UNTIED, tensors(_transpose), "trained weights"),
    "two layers exchanged": (UNTIED, tensors(_swap_layers), "trained weights"),
    "another order of rotary pairs": (UNTIED, tensors(_interleave), "trained weights"),
    "half an embedding of zeros": (UNTIED, tensors(_forget_half_a_token), "trained weights"),
    "a number that is none": (UNTIED, tensors(_one_nan), "trained weights"),
    "a norm off by 1 %": (UNTIED, tensors(_rescale_norm), "trained weights"),
    "a renamed tensor": (UNTIED, tensors(_rename), "files"),
    "a truncated file": (UNTIED, _truncate, "files"),
    "a missing file of two": (UNTIED, _lose_a_file, "files"),
    "another RoPE base": (UNTIED, config(rope_parameters=ROPE), "trained weights"),
    "another epsilon": (UNTIED, config(rms_norm_eps=0.3), "trained weights"),
    "another activation": (SHAPES["gpt2"], config(activation_function="relu"), "files"),
    "another number of heads": (UNTIED, config(num_attention_heads=2), "files"),
    "untied weights tied": (UNTIED, config(tie_word_embeddings=True), "evaluated weights"),
    "tied weights untied": (TIED, config(tie_word_embeddings=False), "files"),
    "another type": (UNTIED, config(dtype="bfloat16"), "data type"),
    "a shorter context": (UNTIED, config(max_position_embeddings=8), "context"),
    "a window left out": (SHAPES["mistral"], config(sliding_window=None), "trained weights"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    shape, plant, name = FAULTS[fault]
    written = write(shape, tmp_path)
    plant(written)
    assert name in written.failing()


def _drop_delta(written: Written) -> None:
    assert written.adapter
    shutil.copyfile(written.adapter.base / "model.safetensors", written.weights)


def _change_scale(written: Written) -> None:
    assert written.adapter
    path = written.adapter.folder / "adapter_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"lora_alpha": 2 * values["lora_alpha"]}))


def _empty_adapter(written: Written) -> None:
    assert written.adapter
    path = written.adapter.folder / "adapter_model.safetensors"
    found = load_file(path)
    save_file({k: torch.zeros_like(v) for k, v in found.items()}, path, {"format": "pt"})


def _half_of_the_layers(written: Written) -> None:
    assert written.adapter
    path = written.adapter.folder / "adapter_model.safetensors"
    found = {k: v for k, v in load_file(path).items() if ".layers.1." not in k}
    save_file(found, path, {"format": "pt"})


@pytest.mark.parametrize("kind", ["lora", "qlora"])
@pytest.mark.parametrize(
    "plant",
    [_drop_delta, _change_scale, _empty_adapter, _half_of_the_layers],
    ids=["the base without the adapter", "another scale", "an empty adapter", "half an adapter"],
)
def test_a_fault_of_an_adapter_is_refused_by_name(
    plant: Callable[[Written], None], kind: str, tmp_path: Path
) -> None:
    written = write_adapted(UNTIED, tmp_path, kind)
    plant(written)
    assert "adapter" in written.failing()
