"""A folder of weights, and weights from a seed, are the same under every layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.models import pretrained, safetensors_files
from pipelines.models.config import DecoderConfig, Yarn
from pipelines.models.families import flags
from pipelines.models.initial_model import build_model
from pipelines.models.lora import adapted_layers
from pipelines.models.pretrained import load_pretrained, load_weights, save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.models.weights import whole
from pipelines.parallel.layout import resolve_layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from tests.distributed.pool import Pool
from tests.settled import FP32

SIZE = {
    "layers": 4,
    "width": 32,
    "heads": 4,
    "kv_heads": 4,
    "hidden": 48,
    "vocab_size": 62,
    "context_length": 16,
}
LLAMA = DecoderConfig(**SIZE | {"kv_heads": 2})  # tied
GPT2 = DecoderConfig(**SIZE, **flags("gpt2"))
GPT_NEOX = DecoderConfig(**SIZE, **flags("gpt_neox"))
# Of four processes each would have two, and the last none.
EXPERTS = DecoderConfig(**SIZE | {"kv_heads": 2} | flags("mixtral"), experts=5, experts_per_token=2)
PHI3 = DecoderConfig(**SIZE | {"kv_heads": 2} | flags("phi3"))
GEMMA3 = DecoderConfig(
    **SIZE | flags("gemma3_text") | {"kv_heads": 2, "head_dim": 16, "full_attention_every": 2}
)
GPT_OSS = DecoderConfig(
    **SIZE | flags("gpt_oss") | {"kv_heads": 2, "rope_scaling": Yarn(4.0, 8)},
    experts=6,
    experts_per_token=2,
)
_LATENTS = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "v_head_dim": 8}
_LATENTS |= {"qk_rope_head_dim": 6, "first_k_dense_replace": 1, "dense_hidden": 32}
_LATENTS |= {"experts": 6, "experts_per_token": 2, "n_group": 3, "topk_group": 2}
DEEPSEEK = DecoderConfig(**SIZE | flags("deepseek_v3") | _LATENTS)
BY_PAIRS = replace(EXPERTS, experts=6)

FSDP = {"sharding": "full", "dp_shard": 2}
MORE = pytest.mark.parity
BY_16 = DecoderConfig(**SIZE)
CASES = {
    "fsdp": (2, LLAMA, FSDP),
    "fsdp-fp8": (2, BY_16, FSDP),
    "fsdp-gpt2": (2, GPT2, FSDP),
    "fsdp-phi3": (2, PHI3, FSDP),
    "fsdp-gemma3": (2, GEMMA3, FSDP),
    "pp-gemma3": (2, GEMMA3, {"pp": 2}),
    "tp-gemma3": (2, GEMMA3, {"tp": 2}),
    "tp-phi3": (2, PHI3, {"tp": 2}),
    "fsdp-deepseek": (2, DEEPSEEK, FSDP),
    "pp-deepseek": (2, DEEPSEEK, {"pp": 2}),
    "tp-deepseek": (2, DEEPSEEK, {"tp": 2}),
    "ep-deepseek": (2, DEEPSEEK, FSDP | {"ep": 2}),
    "tp": (2, LLAMA, {"tp": 2}),
    "tp-fsdp-gpt_neox": (4, GPT_NEOX, {"tp": 2, "sharding": "full", "dp_shard": 2}),
    "fsdp-experts": (2, EXPERTS, FSDP),
    "fsdp-experts-4": (4, EXPERTS, {"sharding": "full", "dp_shard": 4}),
    "tp-fsdp-experts": (4, EXPERTS, {"tp": 2, "sharding": "full", "dp_shard": 2}),
    "ep-experts": (2, BY_PAIRS, FSDP | {"ep": 2}),
    "ep-tp-experts": (4, BY_PAIRS, FSDP | {"ep": 2, "tp": 2}),
    "fsdp-gpt_oss": (2, GPT_OSS, FSDP),
    "tp-gpt_oss": (2, GPT_OSS, {"tp": 2}),
    "ep-gpt_oss": (2, GPT_OSS, FSDP | {"ep": 2}),
    "tp-fsdp-gpt_oss": (4, GPT_OSS, FSDP | {"tp": 2}),
    "ep-tp-fsdp-gpt_oss": (8, GPT_OSS, FSDP | {"dp_shard": 4, "ep": 2, "tp": 2}),
    "ep-tp-gpt_oss": (4, GPT_OSS, FSDP | {"ep": 2, "tp": 2}),
    "pp-fsdp": (4, LLAMA, {"pp": 2, "sharding": "full", "dp_shard": 2}),
    "pp-tp-gpt2": (4, GPT2, {"pp": 2, "tp": 2}),
}


def lay_and_save(
    config: DecoderConfig,
    parallel: dict[str, Any],
    read: Path,
    folder: Path,
    precision: str = "fp32",
) -> None:
    """What each process does: fill the model from a seed, or a folder, and write it together."""
    train = FP32 | {"precision": precision}
    recipe = Recipe.model_validate({"name": "t", "parallel": parallel, "train": train})
    mesh = build_mesh(resolve_layout(recipe.parallel, torch.distributed.get_world_size()), CPU)
    fills: dict[str, Callable[[Transformer], None]] = {
        "drawn": lambda part: part.init_weights(3),
        "loaded": partial(load_weights, folder=read),
    }
    for name, fill in fills.items():
        with torch.device("meta"):
            model = Transformer(config)
        parts = parallelize(model, mesh, recipe, fill).modules
        save_pretrained(parts, folder / name)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[MORE] if CASES[each][0] > 2 else []) for each in CASES]
)
def test_every_layout_writes_the_folder_of_one_process(
    name: str, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    world, config, parallel = CASES[name]
    alone = Transformer(config)
    alone.init_weights(3)
    save_pretrained(alone, tmp_path / "alone")
    precision = "fp8" if name.endswith("fp8") else "fp32"  # of the products; weights are the same
    pool(world).run(lay_and_save, config, parallel, tmp_path / "alone", tmp_path, precision)
    for file in ("model.safetensors", "config.json"):
        expected = (tmp_path / "alone" / file).read_bytes()
        assert (tmp_path / "drawn" / file).read_bytes() == expected
        assert (tmp_path / "loaded" / file).read_bytes() == expected


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield the sizes of what is read from safetensors, in bytes."""
    seen: list[int] = []
    read_whole = safetensors_files.read_whole

    def count(reader: Any, file: int, offset: int, out: torch.Tensor) -> Any:
        seen.append(out.nbytes)
        return read_whole(reader, file, offset, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_files, "read_whole", count)
        yield seen


def shares(parallel: dict[str, Any], read: Path, folder: Path) -> tuple[int, list[str]]:
    """What each process reads, in bytes, and which files it writes; it writes several."""
    written = []
    write = pretrained._write

    def note(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        written.append(path.name)
        write(path, tensors)

    with counted() as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "_write", note)
        patch.setattr(pretrained, "FILE_BYTES", 10_000)
        lay_and_save(LLAMA, parallel, read, folder)
    return sum(seen), written


def test_each_process_reads_its_own_rows_and_writes_its_share_of_the_files(
    pool: Callable[[int], Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Transformer(LLAMA)
    alone.init_weights(3)
    save_pretrained(alone, tmp_path / "alone")
    (first, mine), (second, others) = pool(2).run(shares, FSDP, tmp_path / "alone", tmp_path)
    total = sum(parameter.nbytes for parameter in alone.parameters())
    assert first == second == total // 2
    monkeypatch.setattr(pretrained, "FILE_BYTES", 10_000)
    save_pretrained(alone, tmp_path / "again")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    for name in ("drawn", "loaded"):
        found = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        assert found == expected
    files = sorted(name for name in expected if name.endswith(".safetensors"))
    assert len(files) > 4
    # Both models, file after file.
    assert mine == files[::2] * 2
    assert others == files[1::2] * 2


@pytest.mark.parity
def test_a_process_that_holds_a_part_of_each_row_reads_its_own_rows_alone(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    alone = Transformer(LLAMA)
    alone.init_weights(3)
    save_pretrained(alone, tmp_path / "alone")
    parallel = {"tp": 2, "sharding": "full", "dp_shard": 2}
    found = pool(4).run(shares, parallel, tmp_path / "alone", tmp_path)
    sizes = {name: parameter.nbytes for name, parameter in alone.named_parameters()}
    total = sum(sizes.values())
    # Of these, each holds half of half the rows; of norms, half; of others, a quarter of the rows.
    by_columns = sum(sizes[name] for name in sizes if "o_proj" in name or "down_proj" in name)
    norms = sum(sizes[name] for name in sizes if "norm" in name)
    quarters = (total - by_columns - norms) // 4
    # The vocabulary's 62 rows are not equally many for all.
    expected = by_columns // 2 + norms // 2 + quarters
    assert sum(bytes_read for bytes_read, _ in found) == 4 * expected


def loaded_below_adapters(read: Path) -> tuple[int, bool]:
    """What each process reads, in bytes, of a model with LoRA, and whether it got the weights."""
    sections = {"parallel": FSDP, "adapter": {"kind": "lora"}, "train": FP32}
    recipe = Recipe.model_validate({"name": "t", **sections})
    mesh = build_mesh(resolve_layout(recipe.parallel, 2), CPU)
    model = build_model(recipe, LLAMA)
    with counted() as seen:
        parallelize(model, mesh, recipe, partial(load_weights, folder=read))
    plain = load_pretrained(read)
    layers = adapted_layers(model).items()
    pairs = [(whole(each.base.weight), plain.get_submodule(name).weight) for name, each in layers]
    return sum(seen), all(torch.equal(*pair) for pair in pairs)


def test_weights_below_adapters_are_read_by_rows_too(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    alone = Transformer(LLAMA)
    alone.init_weights(3)
    save_pretrained(alone, tmp_path)
    half = sum(parameter.nbytes for parameter in alone.parameters()) // 2
    assert pool(2).run(loaded_below_adapters, tmp_path) == [(half, True)] * 2
