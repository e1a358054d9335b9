"""Compiled blocks that compute something else end a run before its first step."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from pipelines.core.errors import SharedError
from pipelines.models.config import DecoderConfig, Yarn
from pipelines.models.families import flags
from pipelines.parallel import parallelize
from pipelines.parallel.layout import resolve_layout
from pipelines.parallel.mesh import build_mesh
from pipelines.recipe.recipe import Recipe
from pipelines.training.compile_check import Bounds, check_compiled, difference
from pipelines.training.precision import set_precision
from tests.compiling import needs_a_linker
from tests.distributed.training import SHAPE, Case, losses, make_data

Graph = Callable[..., Any]
_EXPERTS = {"experts": 4, "experts_per_token": 2}
_GPT_OSS = flags("gpt_oss") | _EXPERTS | {"kv_heads": 2, "sliding_window": 5}
_LATENTS = flags("deepseek_v3") | _EXPERTS | {"kv_heads": 4, "n_group": 1, "dense_hidden": 48}
_LATENTS |= {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6}
_GEMMA3 = flags("gemma3_text") | {"kv_heads": 2, "head_dim": 16, "sliding_window": 5}
KINDS = {
    "llama": {},
    "gemma3": {**_GEMMA3, "full_attention_every": 3},
    "gpt_oss": {**_GPT_OSS, "rope_scaling": Yarn(4.0, 8)},
    "deepseek_v3": {**_LATENTS, "v_head_dim": 9, "first_k_dense_replace": 3},
}

pytestmark = needs_a_linker


class Tokens:
    """A loader, as far as the check reads it."""

    tokens_per_step = 64
    most_documents = 4


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def check(shape: dict[str, Any] | None = None, **sections: dict[str, Any]) -> None:
    train = {"precision": "fp32", "compile": True, "micro_batch_size": 4, "global_batch_size": 4}
    values = {
        "name": "checked",
        "train": train | sections.pop("train", {}),
        "data": {"sequence_length": 16} | sections.pop("data", {}),
    }
    recipe = Recipe.model_validate(values | sections)
    set_precision(recipe.train, torch.device("cpu"))
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = build_mesh(resolve_layout(recipe.parallel, world), torch.device("cpu"))
    check_compiled(recipe, DecoderConfig(**SHAPE | (shape or {})), Tokens(), mesh)  # type: ignore[arg-type]


def plant(monkeypatch: pytest.MonkeyPatch, **compilers: Graph) -> None:
    """Have blocks compiled by a compiler that makes a mistake."""
    plain = dict.fromkeys(("fw_compiler", "bw_compiler", "inference_compiler"), untouched)
    backend = aot_autograd(**plain | compilers)
    planted = partial(_compiled, parallelize.compile_blocks, backend)
    monkeypatch.setattr(parallelize, "compile_blocks", planted)


def _compiled(compile_blocks: Graph, backend: Graph, part: Any, options: Any) -> None:
    assert options is None
    compile_blocks(part, backend=backend)


def untouched(graph: fx.GraphModule, _: list[Tensor]) -> Graph:
    """Compute what the graph says."""
    return _boxed(graph, lambda each: each)


def wrong(graph: fx.GraphModule, _: list[Tensor]) -> Graph:
    """What is no whole number is half as large again."""
    return _boxed(graph, lambda each: each * 1.5 if each.is_floating_point() else each)


def _boxed(graph: fx.GraphModule, change: Callable[[Tensor], Tensor]) -> Graph:
    def run(arguments: list[Any]) -> list[Any]:
        found = graph(*arguments)
        arguments.clear()
        return [change(each) if isinstance(each, Tensor) else each for each in found]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_are_compiled_right_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    check(KINDS[kind])
    check(KINDS[kind], data={"document_mask": True, "packing": "best_fit"})


def test_adapters_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for kind in ("lora", "qlora"):
        shape = {"width": 64, "hidden": 128}
        adapter = {"kind": kind, "rank": 4, "dropout": 0.5}
        check(shape, adapter=adapter, model={"init_from": "models/base"})


def test_what_torch_compiles_passes_also_in_half_precision() -> None:
    check(train={"precision": "bf16"})


@pytest.mark.parametrize(
    ("compiler", "told"),
    [
        ("bw_compiler", "the gradient of embed_tokens.weight is off by"),
        ("fw_compiler", "the blocks' output 0 is off by"),
        ("inference_compiler", "the blocks' output without gradients 0 is off by"),
    ],
)
def test_a_mistake_ends_the_run_and_is_named(
    compiler: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, **{compiler: wrong})
    pairs = {"instruction": {"kind": "preference"}, "packing": "best_fit", "document_mask": True}
    with pytest.raises(SharedError, match=told) as error:
        check(preference={"kind": "dpo"}, data=pairs)
    assert "set train.compile = false" in str(error.value)
    check(train={"compile": False})


def test_the_run_compiles_nothing_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch)
    counters.clear()
    case = Case("compiled", 1, {}, {"micro_batch_size": 4, "compile": True, "steps": 2})
    check()
    compiled = counters["stats"]["unique_graphs"]
    losses(case, (tmp_path, make_data(tmp_path)), tmp_path, torch.float32)
    assert counters["stats"]["unique_graphs"] == compiled > 0


def test_rounding_is_no_mistake() -> None:
    bounds = Bounds(0.03, 0.1)
    rows = torch.ones(50, 2)
    right = {"output 0": rows, "large": torch.ones(100), "small": torch.full((4,), 1e-3)}
    near = {"output 0": rows * 1.02, "large": right["large"] * 0.95, "small": -right["small"]}
    assert difference(right, near, bounds) is None
    changes = {
        "output 0": [rows * 1.04, rows * torch.nan],
        "large": [torch.ones(100) * 27, torch.full((100,), torch.nan)],
        "small": [torch.ones(4)],
    }
    for name, numbers in changes.items():
        for changed in numbers:
            assert name in (difference(right, right | {name: changed}, bounds) or "")


def test_few_tokens_may_choose_another_expert() -> None:
    bounds, rows = Bounds(0.03, 0.5, spared=0.1), torch.ones(50, 2)
    for tokens, is_wrong in ((5, False), (6, True)):
        found = rows.clone()
        found[:tokens] *= 3
        told = difference({"output 0": rows}, {"output 0": found}, bounds)
        assert (told is not None) == is_wrong
