"""What the compiler made of a model's blocks, beside the blocks themselves, before the first step.

A compiler's mistake raises nothing: a loss that looks right may come with wrong gradients, as one
GPU showed (decision 0028). So a model of few layers, as wide as the run's and laid over the same
processes, takes one step with blocks that are compiled, and one with blocks that are not. What is
compiled for it serves the run, too.
"""

import gc
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipelines.core.errors import SharedError
from pipelines.loading.dataloader import Batch, Loader
from pipelines.models.config import DecoderConfig
from pipelines.models.initial_model import build_model, fill_randomly
from pipelines.models.weights import local
from pipelines.parallel.layout import stage_count
from pipelines.parallel.mesh import Mesh
from pipelines.parallel.parallelize import Parallelized, parallelize
from pipelines.parallel.process_group import from_all, rank
from pipelines.planning.precision_rule import COMPILE, PRECISION
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import override_values
from pipelines.training.forward_backward import forward_backward
from pipelines.training.routing import Routing

# Of all gradients together: one that is far smaller may be nothing but rounding, as that of biases.
_ROUNDING_SHARE = 0.02
_KINDS = 2  # of layers that a model has: with a window and without, with experts and without
_SEED = 0


class Bounds(NamedTuple):
    """How far compiled blocks may be from blocks that are not; mistakes are far beyond.

    Attributes:
        outputs: Of the size of all outputs.
        gradients: Of the size of a parameter's gradient.
        spared: The share of tokens whose outputs do not count.
    """

    outputs: float
    gradients: float
    spared: float = 0.0


_ROUNDING = Bounds(0.03, 0.1)
_WITH_EXPERTS = Bounds(0.03, 0.5, spared=0.1)  # by rounding, few tokens choose another expert
_IN_FP8 = Bounds(0.15, 0.5, spared=0.1)  # which is always compiled: bf16 stands beside it

_log = logging.getLogger(__name__)


def check_compiled(recipe: Recipe, config: DecoderConfig, loader: Loader, mesh: Mesh) -> None:
    """Compare compiled blocks with those of the same weights that are not; all processes call this.

    Args:
        recipe: The run's, with no `auto` left.
        config: The model's shape.
        loader: Its documents and tokens of a step are used.
        mesh: Of all processes.

    Raises:
        SharedError: on some process, outputs or gradients are not the same.
    """
    if not recipe.train.fixed_compile:
        return
    began = time.monotonic()
    if rank() == 0:
        _log.info("train.compile: comparing compiled blocks with the blocks before the first step")
    is_fp8 = recipe.train.fixed_precision == "fp8"
    recipe = override_values(recipe, {"adapter.dropout": 0.0})  # which is drawn anew each time
    plain = override_values(recipe, {COMPILE: False} | ({PRECISION: "bf16"} if is_fp8 else {}))
    bounds = _IN_FP8 if is_fp8 else _WITH_EXPERTS if config.experts else _ROUNDING
    expected, found = (_step(each, config, loader, mesh) for each in (plain, recipe))
    gc.collect()  # a model and its hooks hold each other
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # what follows is the run's
    wrong = next(filter(None, from_all(difference(expected, found, bounds))), None)
    if wrong is not None:
        device = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "this CPU"
        raise SharedError(
            f"train.compile: with torch {torch.__version__} on {device}, {wrong}: torch's compiler "
            "makes a mistake with this model; set train.compile = false"
        )
    if rank() == 0:
        seconds = time.monotonic() - began
        _log.info("train.compile: compiled blocks give what blocks do (%.0f s)", seconds)


def difference(expected: dict[str, Tensor], found: dict[str, Tensor], bounds: Bounds) -> str | None:
    """Return what of a step with compiled blocks is not as without them, beyond rounding, or None.

    Args:
        expected: Outputs, whose names begin with "output", and gradients, by name.
        found: The same of the compiled blocks.
        bounds: How far they may be apart.
    """
    gradients = [name for name in expected if not name.startswith("output")]
    total = math.hypot(*(expected[name].norm().item() for name in gradients))
    for name, right in expected.items():
        size, apart = right.norm().item(), found[name] - right
        if is_output := name not in gradients:
            by_token = apart.flatten(0, -2).norm(dim=-1).sort().values
            apart = by_token[: len(by_token) - int(bounds.spared * len(by_token))]
            allowed = bounds.outputs * size
        else:
            allowed = bounds.gradients * size + _ROUNDING_SHARE * total
        off = apart.norm().item()
        if not off <= allowed:  # so that what is no number is wrong too
            kind = "the blocks'" if is_output else "the gradient of"
            return f"{kind} {name} is off by {off / (size or 1):.2g} of its size once compiled"
    return None


def _step(recipe: Recipe, config: DecoderConfig, loader: Loader, mesh: Mesh) -> dict[str, Tensor]:
    """Return the outputs of blocks, with gradients and without, and this process's gradients."""
    train, pp = recipe.train, mesh.layout.pp
    stages = stage_count(recipe.parallel.schedule, pp)
    few = replace(
        config,
        layers=min(config.layers, _KINDS * stages),
        first_k_dense_replace=min(config.first_k_dense_replace, 1),
        full_attention_every=config.full_attention_every and _KINDS,
    )
    model = build_model(recipe, few, config)
    if not any(each.requires_grad for each in model.parameters()):
        return {}  # what has adapters are later layers
    laid = parallelize(model, mesh, recipe, partial(fill_randomly, seed=_SEED, trained=True))
    if train.attention == "varlen":
        for part in laid.modules:
            part.most_documents = loader.most_documents
    Routing(laid, train, loader.tokens_per_step).weigh(1.0)
    run = forward_backward(recipe, laid, pp)
    batch = _drawn(recipe, config, mesh.device)
    batches = [(batch, number == pp) for number in range(1, pp + 1)]
    found: dict[str, Tensor] = {}
    with _outputs(laid, found, "output"):
        run(batches, 1 / batch.targets_BS.numel())
    if recipe.preference.kind != "none":  # else nothing runs without gradients
        with _outputs(laid, found, "output without gradients"):
            run.forward(batches)
    named = laid.named_parameters().items()
    return found | {
        name: local(each.grad).float().cpu() for name, each in named if each.grad is not None
    }


@contextmanager
def _outputs(laid: Parallelized, found: dict[str, Tensor], name: str) -> Iterator[None]:
    """Keep what the last block of each part here returns last."""

    def keep(key: str, _block: nn.Module, _given: object, output: Tensor) -> None:
        found[key] = local(output.detach()).float().cpu()

    hooks = [
        list(part.layers.values())[-1].register_forward_hook(partial(keep, f"{name} {number}"))
        for number, part in enumerate(laid.modules)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _drawn(recipe: Recipe, config: DecoderConfig, device: torch.device) -> Batch:
    """Return a random micro-batch as large as the run's, the same on each process."""
    samples, length = recipe.train.fixed_micro_batch_size, recipe.data.sequence_length
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(config.vocab_size, (samples, length + 1), generator=generator).to(device)
    documents = None
    if recipe.data.document_mask:
        numbers = torch.arange(length, dtype=torch.int32, device=device) * 3 // length
        documents = numbers.expand(samples, -1).contiguous()
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), documents)
