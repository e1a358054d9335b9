"""A folder of weights, and weights from a seed, are the same under every layout."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.models import pretrained, safetensors_files
from pipelines.models.config import DecoderConfig
from pipelines.models.families import flags
from pipelines.models.pretrained import load_weights, save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import resolve_layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from tests.distributed.pool import Pool

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

MORE = pytest.mark.parity
CASES = {
    "fsdp": (2, LLAMA, {"sharding": "full", "dp_shard": 2}),
    "fsdp-gpt2": (2, GPT2, {"sharding": "full", "dp_shard": 2}),
    "tp": (2, LLAMA, {"tp": 2}),
    "tp-fsdp-gpt_neox": (4, GPT_NEOX, {"tp": 2, "sharding": "full", "dp_shard": 2}),
    "pp-fsdp": (4, LLAMA, {"pp": 2, "sharding": "full", "dp_shard": 2}),
    "pp-tp-gpt2": (4, GPT2, {"pp": 2, "tp": 2}),
}


def lay_and_save(config: DecoderConfig, parallel: dict[str, Any], read: Path, folder: Path) -> None:
    """What each process does: fill the model from a seed, or a folder, and write it together."""
    recipe = Recipe.model_validate({"name": "t", "parallel": parallel})
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
    pool(world).run(lay_and_save, config, parallel, tmp_path / "alone", tmp_path)
    for file in ("model.safetensors", "config.json"):
        expected = (tmp_path / "alone" / file).read_bytes()
        assert (tmp_path / "drawn" / file).read_bytes() == expected
        assert (tmp_path / "loaded" / file).read_bytes() == expected


def shares(config: DecoderConfig, read: Path, folder: Path) -> tuple[int, list[str]]:
    """What each process reads, in bytes, and which files it writes; it writes several."""
    seen, written = 0, []
    read_whole, write = safetensors_files.read_whole, pretrained._write

    def count(reader: Any, file: int, offset: int, out: torch.Tensor) -> Any:
        nonlocal seen
        seen += out.nbytes
        return read_whole(reader, file, offset, out)

    def note(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        written.append(path.name)
        write(path, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_files, "read_whole", count)
        patch.setattr(pretrained, "_write", note)
        patch.setattr(pretrained, "FILE_BYTES", 10_000)
        lay_and_save(config, {"sharding": "full", "dp_shard": 2}, read, folder)
    return seen, written


def test_each_process_reads_its_own_rows_and_writes_its_share_of_the_files(
    pool: Callable[[int], Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Transformer(LLAMA)
    alone.init_weights(3)
    save_pretrained(alone, tmp_path / "alone")
    (first, mine), (second, others) = pool(2).run(shares, LLAMA, tmp_path / "alone", tmp_path)
    whole = sum(parameter.nbytes for parameter in alone.parameters())
    assert first == second == whole // 2
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
