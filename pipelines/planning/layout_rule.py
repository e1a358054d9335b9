"""The layouts that a recipe can have, and the rule behind `parallel: auto`; no torch here.

The rule tries layouts from the least communication to the most:

1. one replica per process; then also sharded moments, gradients and weights (ZeRO 1, 2, 3)
2. tensor parallelism over 2, 4, 8 neighbours, with the rest sharded
3. pipeline parallelism over 2, 4, 8, ... stages in addition

A micro-batch is a power of two, at most the process's share of a step and `MOST_TOKENS`; the rule
tries the largest first. If the device's datasheet is known, `auto` takes the first fitting layout
that `step_time.py` predicts within `AS_FAST` of the fastest, else the first fitting layout.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.core.errors import UserError
from pipelines.loading.sampler import check_batch, micro_batches
from pipelines.models.config import DecoderConfig
from pipelines.parallel.division import check_division
from pipelines.parallel.layout import Layout, check_micro_batches, resolve_layout
from pipelines.planning.hardware import Hardware
from pipelines.planning.memory import Memory, estimate
from pipelines.planning.memory_training import SHARDINGS, Training
from pipelines.planning.step_time import step_time
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import override_values

MOST_TOKENS = 16_384  # per micro-batch on one process; more does not make products faster
AS_FAST = 1.05  # of the least time: predictions are no finer, and earlier layouts are simpler
_GIB = 2**30
_WAYS = (1, 2, 4, 8, 16, 32, 64)
_NEIGHBOURS = (1, 2, 4, 8)  # within one node, whose links are fast


@dataclass(frozen=True)
class Choice:
    """A layout and a micro-batch, with the memory that the formulas predict.

    Attributes:
        laid: The recipe with this layout; some sizes may still be `auto`.
        training: The settings of training that follow from the layout.
        memory: The memory of the device that needs most.
    """

    laid: Recipe
    training: Training
    memory: Memory

    @property
    def layout(self) -> Layout:
        """The number of processes by dimension."""
        return self.training.layout

    @property
    def recipe(self) -> Recipe:
        """The recipe with every `auto` replaced."""
        training = self.training
        values: dict[str, object] = {
            f"parallel.{key}": getattr(self.layout, key) for key in ("dp_replicate", "dp_shard")
        }
        values["train.micro_batch_size"] = training.micro_batch
        values["train.activation_checkpoint"] = training.activation_checkpoint
        return override_values(self.laid, values)

    def __str__(self) -> str:
        training = self.training
        return (
            f"{self.layout}, sharding {training.sharding}, micro_batch_size "
            f"{training.micro_batch}: {self.memory.total / _GIB:.3g} GiB a device"
        )


@dataclass(frozen=True)
class Refusal:
    """An impossible layout, for which nothing is estimated."""

    laid: Recipe
    why: UserError

    def __str__(self) -> str:
        parallel = self.laid.parallel
        return f"pp({parallel.pp}) * tp({parallel.tp}), sharding {parallel.sharding}"


def is_left_to_the_rule(recipe: Recipe) -> bool:
    """Return whether the recipe leaves its layout or its micro-batch to this rule."""
    return recipe.parallel.by_rule or recipe.train.micro_batch_size == "auto"


def choose(
    recipe: Recipe,
    config: DecoderConfig,
    world: int,
    device_bytes: float,
    *,
    below: float = math.inf,
    hardware: Hardware | None = None,
) -> Choice:
    """Return the choice that replaces `auto`; without any `auto`, the recipe's own layout.

    Args:
        recipe: The recipe whose `auto` values are replaced; fixed values stay.
        config: The model's shape, with vocabulary and context filled in.
        world: The number of processes.
        device_bytes: The memory of the smallest device.
        below: The predicted bytes of a choice that ran out of memory; the next choice needs
            less, with the same global batch and order of samples.
        hardware: The type of all devices, if its datasheet is known.

    Raises:
        UserError: Nothing fits, or the fixed values fit no number of processes.
    """
    choices = _choices(recipe, config, world)
    if not is_left_to_the_rule(recipe):
        return choices[0]
    fitting = [
        each for each in choices if each.memory.total <= device_bytes and each.memory.total < below
    ]
    if fitting:
        return fitting[0] if hardware is None else _fast(fitting, config, hardware)
    least = min(choices, key=lambda each: each.memory.total)
    ran_out = "" if below == math.inf else f", and {below / _GIB:.3g} GiB were too many"
    raise UserError(
        f"no layout of {world} processes fits {device_bytes / _GIB:.3g} GiB a device{ran_out}; "
        f"the least is {least}; use more or larger devices, a smaller model, or "
        "train.activation_checkpoint = full"
    )


def _fast(fitting: list[Choice], config: DecoderConfig, hardware: Hardware) -> Choice:
    """Return the first choice that is about as fast as the fastest."""
    seconds = [step_time(config, each.training, hardware).total for each in fitting]
    return next(
        each for each, time in zip(fitting, seconds, strict=True) if time <= AS_FAST * min(seconds)
    )


def _choices(recipe: Recipe, config: DecoderConfig, world: int) -> list[Choice]:
    """Return every possible choice, at least one, in the rule's order.

    Raises:
        UserError: No choice is possible; the error says what is wrong with the first.
    """
    tried = list(tries(recipe, config, world))
    choices = [each for each in tried if isinstance(each, Choice)]
    if not choices:
        raise next(each.why for each in tried if isinstance(each, Refusal))
    return choices


def tries(recipe: Recipe, config: DecoderConfig, world: int) -> Iterator[Choice | Refusal]:
    """Yield every layout and micro-batch that the rule tries, in its order.

    Args:
        recipe: The recipe whose `auto` values are tried; fixed values stay.
        config: The model's shape, with vocabulary and context filled in.
        world: The number of processes.
    """
    for laid in _laid(recipe, world):
        try:
            layout = resolve_layout(laid.parallel, world)
            sizes = _micro_batches(laid, layout)
            check_division(config, layout, laid)
        except UserError as error:
            yield Refusal(laid, error)
            continue
        for micro_batch in sizes:
            training = _training(laid, layout, micro_batch)
            try:
                if layout.pp > 1:
                    check_micro_batches(training.schedule, layout.pp, training.micro_batches)
            except UserError as error:  # a smaller micro-batch may work
                yield Refusal(laid, error)
                continue
            yield Choice(laid, training, estimate(config, training))


def _laid(recipe: Recipe, world: int) -> Iterator[Recipe]:
    """Yield the recipe with each layout that the rule tries, in its order."""
    parallel = recipe.parallel
    for pp in _WAYS if parallel.pp == "auto" else [_fixed(parallel.pp)]:
        for tp in _NEIGHBOURS if parallel.tp == "auto" else [_fixed(parallel.tp)]:
            if "auto" in (parallel.pp, parallel.tp) and 1 < pp * tp > world:
                continue
            shardings: Sequence[str] = [parallel.sharding]
            if parallel.sharding == "auto":
                alone = world == pp * tp
                # The rule tries tensor and pipeline parallelism only with ZeRO's last stage.
                shardings = ["none"] if alone else SHARDINGS if pp == tp == 1 else ["full"]
            for sharding in shardings:
                values = {"pp": pp, "tp": tp, "sharding": sharding}
                yield override_values(recipe, {f"parallel.{key}": values[key] for key in values})


def _fixed(number: int | Literal["auto"]) -> int:
    return 1 if number == "auto" else number


def _micro_batches(recipe: Recipe, layout: Layout) -> list[int]:
    """Return every micro-batch size that the rule tries, the largest first."""
    train = recipe.train
    check_batch(train.global_batch_size, layout.dp)
    share = train.global_batch_size // layout.dp
    if train.micro_batch_size != "auto":
        return [train.micro_batch_size]
    tokens = recipe.data.sequence_length / layout.cp
    most = min(share, max(1, int(MOST_TOKENS / tokens)))
    powers = (2**power for power in range(most.bit_length() - 1, -1, -1))
    return [size for size in powers if not share % size and not train.global_batch_size % size]


def _training(recipe: Recipe, layout: Layout, micro_batch: int) -> Training:
    parallel, train = recipe.parallel, recipe.train
    return Training(
        layout=layout,
        sharding=parallel.sharding,  # type: ignore[arg-type]  # no auto any more
        micro_batch=micro_batch,
        micro_batches=micro_batches(train.global_batch_size, layout.dp, micro_batch),
        sequence=recipe.data.sequence_length,
        precision=train.fixed_precision,
        fp8_scaling=train.fp8_scaling,
        activation_checkpoint=train.activation_checkpoint,
        schedule=parallel.schedule,
        cpu_offload=parallel.cpu_offload,
        paged_moments=parallel.paged_moments,
        adapter=recipe.adapter,
        optimizer=train.optimizer,
        sequence_parallel=parallel.sequence_parallel,
        async_tp=parallel.async_tp,
        compiled=train.fixed_compile,
        reduce_dtype=parallel.reduce_dtype,
        ep=parallel.ep,
    )
