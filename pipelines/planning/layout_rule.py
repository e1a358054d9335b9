"""The rule behind `parallel: auto` and `train.micro_batch_size: auto`; no torch here.

Layouts are tried from the least communication to the most, and of the first that fits the largest
micro-batch is taken that fits with it:

1. one replica a process; then its moments sharded, then gradients, then weights (ZeRO 1, 2, 3)
2. tensor parallel over 2, 4, 8 neighbours, with the rest sharded
3. pipeline parallel over 2, 4, 8, ... stages beside that

A micro-batch is a power of two, at most this process's share of a step and `MOST_TOKENS`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.recipe import Recipe
from pipelines.core.recipe_files import override_values
from pipelines.distributed.layout import Layout, resolve_layout
from pipelines.models.config import DecoderConfig
from pipelines.planning.memory import Memory, Training, estimate

HEADROOM = 0.9  # of a device's memory; the rest is the allocator's, the library's and NCCL's
MOST_TOKENS = 16_384  # a micro-batch; beyond it matrix products gain nothing
_GIB = 2**30
_SHARDINGS = ("none", "optimizer", "gradients", "full")
_WAYS = (1, 2, 4, 8, 16, 32, 64)
_MOST_TP = 8  # neighbours that share one node's fast links


@dataclass(frozen=True)
class Choice:
    """A recipe without `auto`, and what the formulas say of it."""

    recipe: Recipe
    layout: Layout
    memory: Memory

    def __str__(self) -> str:
        parallel, train = self.recipe.parallel, self.recipe.train
        return (
            f"{self.layout}, sharding {parallel.sharding}, micro_batch_size "
            f"{train.micro_batch_size}: {self.memory.total / _GIB:.3g} GiB a device"
        )


def is_left_to_the_rule(recipe: Recipe) -> bool:
    """Whether the recipe leaves its layout or its micro-batch to this rule."""
    return recipe.parallel.by_rule or recipe.train.micro_batch_size == "auto"


def choose(
    recipe: Recipe,
    config: DecoderConfig,
    world: int,
    device_bytes: float,
    *,
    below: float = math.inf,
) -> Choice:
    """What the rule takes; with nothing on `auto`, the recipe as it is.

    Args:
        recipe: Whose `auto` are to be replaced; what is fixed stays.
        config: The model's shape, sized.
        world: Processes.
        device_bytes: Memory of the smallest device.
        below: What a choice needed by the formulas that ran out of memory all the same; the next
            one that needs less has the same global batch and order of samples.

    Raises:
        UserError: nothing fits, or what is fixed fits no number of processes.
    """
    choices = list(_choices(recipe, config, world))
    if not is_left_to_the_rule(recipe):
        return choices[0]
    for choice in choices:
        if choice.memory.total <= device_bytes * HEADROOM and choice.memory.total < below:
            return choice
    least = min(choices, key=lambda each: each.memory.total)
    ran_out = "" if below == math.inf else f", and {below / _GIB:.3g} GiB were too much"
    raise UserError(
        f"no layout of {world} processes fits {device_bytes / _GIB:.3g} GiB a device{ran_out}; "
        f"the least is {least}; use more or larger devices, a smaller model, or "
        "train.activation_checkpoint = full"
    )


def _choices(recipe: Recipe, config: DecoderConfig, world: int) -> Iterator[Choice]:
    """Every choice that is possible, the best first."""
    parallel = recipe.parallel
    for pp in _tried(parallel.pp, _WAYS):
        for tp in _tried(parallel.tp, _WAYS[: _WAYS.index(_MOST_TP) + 1]):
            for sharding in _tried(parallel.sharding, _SHARDINGS):
                if _is_possible(recipe, config, world, pp, tp, sharding):
                    fixed = {"parallel.pp": pp, "parallel.tp": tp, "parallel.sharding": sharding}
                    yield from _micro_batches(override_values(recipe, fixed), config, world)


def _tried(value: Any, ways: tuple[Any, ...]) -> tuple[Any, ...]:
    return ways if value == "auto" else (value,)


def _is_possible(
    recipe: Recipe, config: DecoderConfig, world: int, pp: int, tp: int, sharding: str
) -> bool:
    """Whether the rule looks at it; what a person fixed is not second-guessed here."""
    parallel = recipe.parallel
    if recipe.adapter.kind != "none" and "auto" in (parallel.pp, parallel.tp) and pp * tp > 1:
        return False  # adapters are not divided
    if parallel.pp == "auto" and (world % (pp * tp) or config.layers < pp):
        return False
    if parallel.tp == "auto" and (world % (pp * tp) or config.kv_heads % tp):
        return False
    if parallel.sharding != "auto":
        return True
    if world == pp * tp * parallel.cp:
        return sharding == "none"  # nothing to shard over
    # Tensor and pipeline parallel come after all of ZeRO, on top of its last stage.
    return pp == tp == 1 or sharding == "full"


def _micro_batches(recipe: Recipe, config: DecoderConfig, world: int) -> Iterator[Choice]:
    layout = resolve_layout(recipe.parallel, world)
    share = max(1, recipe.train.global_batch_size // layout.dp)
    sequence = recipe.data.sequence_length
    sizes = [2**power for power in range(20, -1, -1)]
    if recipe.train.micro_batch_size == "auto":
        most = min(share, max(1, MOST_TOKENS // sequence))
        sizes = [size for size in sizes if size <= most and not share % size]
    else:
        sizes = [recipe.train.micro_batch_size]
    for size in sizes:
        values = {f"parallel.{key}": getattr(layout, key) for key in ("dp_replicate", "dp_shard")}
        chosen = override_values(recipe, values | {"train.micro_batch_size": size})
        yield Choice(chosen, layout, estimate(config, _training(chosen, layout, size, share)))


def _training(recipe: Recipe, layout: Layout, micro_batch: int, share: int) -> Training:
    parallel, train = recipe.parallel, recipe.train
    return Training(
        layout=layout,
        sharding=parallel.sharding,  # type: ignore[arg-type]  # no auto any more
        micro_batch=micro_batch,
        micro_batches=-(-share // micro_batch),
        sequence=recipe.data.sequence_length,
        precision=train.precision,
        activation_checkpoint=train.activation_checkpoint,
        schedule=parallel.schedule,
        cpu_offload=parallel.cpu_offload,
        adapter=recipe.adapter.kind,
    )
