"""The layouts that a recipe can have, and the rule behind `parallel: auto`; no torch here.

Layouts are tried from the least communication to the most:

1. one replica a process; then its moments sharded, then gradients, then weights (ZeRO 1, 2, 3)
2. tensor parallel over 2, 4, 8 neighbours, with the rest sharded
3. pipeline parallel over 2, 4, 8, ... stages beside that

A micro-batch is a power of two, at most this process's share of a step and `MOST_TOKENS`; the
largest comes first. On a device whose datasheet is known `auto` takes of those that fit the first
that `step_time.py` finds as fast as the fastest, within `AS_FAST`; on any other device the first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.parallel.division import check_division
from pipelines.parallel.layout import Layout, check_micro_batches, resolve_layout
from pipelines.planning.hardware import Hardware
from pipelines.planning.memory import Memory, estimate
from pipelines.planning.memory_training import SHARDINGS, Training
from pipelines.planning.step_time import step_time
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import override_values

MOST_TOKENS = 16_384  # a micro-batch on one process; beyond it matrix products gain nothing
AS_FAST = 1.05  # of the least time: predictions are no finer, and the earlier layout is the simpler
_GIB = 2**30
_WAYS = (1, 2, 4, 8, 16, 32, 64)
_NEIGHBOURS = (1, 2, 4, 8)  # within one node, whose links are fast


@dataclass(frozen=True)
class Choice:
    """A layout and a micro-batch, and what the formulas say of them.

    Attributes:
        laid: The recipe, with sizes that may still be `auto`.
        training: What the layout makes of it.
        memory: Of the device that needs most.
    """

    laid: Recipe
    training: Training
    memory: Memory

    @property
    def layout(self) -> Layout:
        """Processes by dimension."""
        return self.training.layout

    @property
    def recipe(self) -> Recipe:
        """Without any `auto`."""
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
    """A layout that can't be, of which nothing is estimated."""

    laid: Recipe
    why: UserError

    def __str__(self) -> str:
        parallel = self.laid.parallel
        return f"pp({parallel.pp}) * tp({parallel.tp}), sharding {parallel.sharding}"


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
    hardware: Hardware | None = None,
) -> Choice:
    """What `auto` becomes; with nothing on `auto`, the recipe as it is.

    Args:
        recipe: Whose `auto` are to be replaced; what is fixed stays.
        config: The model's shape, sized.
        world: Processes.
        device_bytes: Memory of the smallest device.
        below: What a choice needed by the formulas that ran out of memory all the same; the next
            one that needs less has the same global batch and order of samples.
        hardware: Of every device, where its datasheet is known.

    Raises:
        UserError: nothing fits, or what is fixed fits no number of processes.
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
    ran_out = "" if below == math.inf else f", and {below / _GIB:.3g} GiB were too much"
    raise UserError(
        f"no layout of {world} processes fits {device_bytes / _GIB:.3g} GiB a device{ran_out}; "
        f"the least is {least}; use more or larger devices, a smaller model, or "
        "train.activation_checkpoint = full"
    )


def _fast(fitting: list[Choice], config: DecoderConfig, hardware: Hardware) -> Choice:
    """The first that is as fast as the fastest."""
    seconds = [step_time(config, each.training, hardware).total for each in fitting]
    return next(
        each for each, time in zip(fitting, seconds, strict=True) if time <= AS_FAST * min(seconds)
    )


def _choices(recipe: Recipe, config: DecoderConfig, world: int) -> list[Choice]:
    """Every choice that is possible, in the rule's order; at least one.

    Raises:
        UserError: none is; what is wrong with the first.
    """
    tried = list(tries(recipe, config, world))
    choices = [each for each in tried if isinstance(each, Choice)]
    if not choices:
        raise next(each.why for each in tried if isinstance(each, Refusal))
    return choices


def tries(recipe: Recipe, config: DecoderConfig, world: int) -> Iterator[Choice | Refusal]:
    """Every layout and micro-batch that the rule looks at, in its order.

    Args:
        recipe: Whose `auto` are tried; what is fixed stays.
        config: The model's shape, sized.
        world: Processes.
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
            except UserError as error:  # a smaller micro-batch may do
                yield Refusal(laid, error)
                continue
            yield Choice(laid, training, estimate(config, training))


def _laid(recipe: Recipe, world: int) -> Iterator[Recipe]:
    """The recipe with each layout that the rule looks at, in its order."""
    parallel = recipe.parallel
    for pp in _WAYS if parallel.pp == "auto" else [_fixed(parallel.pp)]:
        for tp in _NEIGHBOURS if parallel.tp == "auto" else [_fixed(parallel.tp)]:
            if "auto" in (parallel.pp, parallel.tp) and 1 < pp * tp > world:
                continue
            shardings: Sequence[str] = [parallel.sharding]
            if parallel.sharding == "auto":
                alone = world == pp * tp
                # Tensor and pipeline parallel come after all of ZeRO, on top of its last stage.
                shardings = ["none"] if alone else SHARDINGS if pp == tp == 1 else ["full"]
            for sharding in shardings:
                values = {"pp": pp, "tp": tp, "sharding": sharding}
                yield override_values(recipe, {f"parallel.{key}": values[key] for key in values})


def _fixed(number: int | Literal["auto"]) -> int:
    return 1 if number == "auto" else number


def _micro_batches(recipe: Recipe, layout: Layout) -> list[int]:
    """Each micro-batch that is looked at, the largest first."""
    train = recipe.train
    share = train.global_batch_size // layout.dp
    if not share:
        raise UserError(
            f"train.global_batch_size({train.global_batch_size}) is smaller than the {layout.dp} "
            "data-parallel processes: each needs at least one sample a step"
        )
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
        micro_batches=math.ceil(train.global_batch_size / layout.dp / micro_batch),
        sequence=recipe.data.sequence_length,
        precision=train.precision,
        activation_checkpoint=train.activation_checkpoint,
        schedule=parallel.schedule,
        cpu_offload=parallel.cpu_offload,
        adapter=recipe.adapter,
        optimizer=train.optimizer,
        sequence_parallel=parallel.sequence_parallel,
        compiled=train.compile,
    )
