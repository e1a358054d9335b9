"""How processes are arranged, in numbers; no torch here, so a bad one is refused at once.

The stages of a pipeline in numbers; no torch here, so that bad ones are refused at once.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from math import prod
from typing import Literal

from pipelines.core.errors import UserError
from pipelines.recipe.training_section import Parallel


@dataclass(frozen=True)
class Layout:
    """Processes by dimension, the slowest varying first: neighbours are tensor parallel."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """Processes in all."""
        return prod(astuple(self))

    @property
    def dp(self) -> int:
        """Processes that see samples of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_cp(self) -> int:
        """Processes that see tokens of their own: over them gradients are averaged."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Processes over which sharding divides; those of one sequence take part."""
        return self.dp_shard * self.cp

    def __str__(self) -> str:
        return " * ".join(f"{name}({size})" for name, size in vars(self).items())


def resolve_layout(parallel: Parallel, world: int) -> Layout:
    """Return the layout of `world` processes: an `auto` of data parallel takes what the others
    leave.

    Raises:
        UserError: the numbers do not multiply to `world`, or the sharding isn't for them.
    """
    if parallel.by_rule:
        raise ValueError("parallel: auto is resolved by planning before a mesh is made")
    sizes = {"pp": parallel.pp, "cp": parallel.cp, "tp": parallel.tp}
    sizes |= {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard}
    # What is left goes to where the sharding wants it.
    if sizes["dp_shard"] == "auto" and parallel.sharding == "none":
        sizes["dp_shard"] = 1
    elif sizes["dp_replicate"] == sizes["dp_shard"] == "auto":
        sizes["dp_replicate"] = 1
    fixed = {name: size for name, size in sizes.items() if isinstance(size, int)}
    for name in sizes.keys() - fixed.keys():
        fixed[name] = max(1, world // prod(fixed.values()))
    layout = Layout(**fixed)
    if layout.world != world:
        raise UserError(f"parallel: {layout} = {layout.world} processes, but there are {world}")
    _check_sharding(layout, parallel)
    if parallel.async_tp:
        _check_exchange(layout, parallel)
    return layout


def _check_sharding(layout: Layout, parallel: Parallel) -> None:
    sharding = parallel.sharding
    if layout.dp_shard > 1 and sharding == "none":
        raise UserError(
            f"parallel.dp_shard({layout.dp_shard}) shards nothing with parallel.sharding = none; "
            "set optimizer, gradients or full, or use dp_replicate"
        )
    if sharding != "none" and layout.shards == 1 < layout.dp_replicate:
        raise UserError(
            f"parallel.sharding = {sharding}: dp_replicate({layout.dp_replicate}) leaves nothing "
            "to shard over; lower it, or set parallel.sharding = none"
        )
    if sharding == "optimizer" and layout.tp * layout.pp > 1:
        raise UserError(
            f"parallel.sharding = optimizer: not with parallel.tp({layout.tp}) * "
            f"parallel.pp({layout.pp}); set gradients or full, which need no more memory"
        )
    # FSDP2 keeps sums of micro-batches in the type in which it adds up over processes, where it
    # exchanges them once a step.
    copies = layout.dp_replicate * (layout.cp if sharding == "none" else 1)
    waits = layout.pp > 1 or (copies > 1 and (layout.tp > 1 or sharding in ("gradients", "full")))
    if parallel.reduce_dtype == "bf16" and waits:
        raise UserError(
            f"parallel.reduce_dtype = bf16: not with parallel.pp({layout.pp}), nor with replicas"
            f"({copies}) of shards or of tensor parallel weights, where sums of micro-batches "
            "would also be in bf16; set fp32"
        )
    if parallel.cpu_offload and sharding not in ("gradients", "full"):
        raise UserError(
            f"parallel.cpu_offload: not with parallel.sharding = {sharding}; set gradients or full"
        )


def _check_exchange(layout: Layout, parallel: Parallel) -> None:
    if layout.tp == 1:
        raise UserError(
            "parallel.async_tp: with parallel.tp(1) there is nothing to exchange; raise it, or set "
            "parallel.async_tp = false"
        )
    if not parallel.sequence_parallel:
        raise UserError(
            "parallel.async_tp: not with parallel.sequence_parallel = false, whose sums are not "
            "scattered; set it to true, or parallel.async_tp = false"
        )


def check_places(layout: Layout, device: str, hosts: Sequence[str]) -> None:
    """Check that processes share the memory through which `parallel.async_tp` exchanges.

    Args:
        layout: Of all processes.
        device: The type of their devices.
        hosts: The host of each, by rank.

    Raises:
        UserError: they have no GPUs, or tensor-parallel ones are on several hosts.
    """
    if device != "cuda":
        raise UserError(
            f"parallel.async_tp: it needs NVIDIA GPUs, but this is a {device.upper()}; set "
            "parallel.async_tp = false"
        )
    for first in range(0, layout.world, layout.tp):
        several = list(dict.fromkeys(hosts[first : first + layout.tp]))
        if len(several) > 1:
            raise UserError(
                f"parallel.async_tp: the processes {first} to {first + layout.tp - 1} of "
                f"parallel.tp({layout.tp}) must share a host, but are on {' and '.join(several)}; "
                "lower it, or set parallel.async_tp = false"
            )


Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]

# With two stages a process, it waits half as long at the beginning and the end of a step.
_STAGES_EACH: dict[Schedule, int] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "zero_bubble": 2,
}


def stage_count(schedule: Schedule, pp: int) -> int:
    """Stages of all processes of a pipeline."""
    return _STAGES_EACH[schedule] * pp


def stage_numbers(schedule: Schedule, pp: int, rank: int) -> range:
    """Return the stages of one process; the first process has the first, the last one the last."""
    return range(rank, stage_count(schedule, pp), pp)


@cache  # a search of layouts asks thousands of times
def split_layers(layers: int, stages: int, *, after: float = 0.0) -> tuple[range, ...]:
    """Return which layers each stage has, so that the slowest is as fast as can be.

    Args:
        layers: Of the model, all alike.
        stages: Each gets one layer at least.
        after: What the last stage does besides, in layers.

    Raises:
        UserError: there are more stages than layers.
    """
    if stages > layers:
        raise UserError(
            f"the pipeline has {stages} stages, but the model only {layers} layers; lower "
            "parallel.pp, or take a schedule with one stage a process: gpipe, 1f1b"
        )
    counts = [1] * stages
    for _ in range(layers - stages):
        loads = [
            count + (after if stage == stages - 1 else 0) for stage, count in enumerate(counts)
        ]
        # Of equals the later one: earlier stages hold the activations of more micro-batches.
        counts[max(range(stages), key=lambda stage: (-loads[stage], stage))] += 1
    stops = [sum(counts[: stage + 1]) for stage in range(stages)]
    return tuple(range(stop - count, stop) for stop, count in zip(stops, counts, strict=True))


def check_micro_batches(schedule: Schedule, pp: int, number: int) -> None:
    """Raise UserError where a schedule can't run so many micro-batches a step."""
    wanted = None
    if schedule == "1f1b" and number < pp:
        wanted = f"{pp} at least"
    rounds = max(1, number // pp)
    if schedule in ("interleaved_1f1b", "zero_bubble") and number % rounds:
        wanted = f"a multiple of {rounds}, such as {number - number % pp}"
    if wanted:
        raise UserError(
            f"parallel.schedule({schedule}) over parallel.pp({pp}) can't run {number} "
            f"micro-batches a step, but {wanted}: change train.global_batch_size or "
            "train.micro_batch_size"
        )
