"""The stages of a pipeline in numbers; no torch here, so that bad ones are refused at once."""

from typing import Literal

from pipelines.core.errors import UserError

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
    """The stages of one process; the first process has the first, the last one the last."""
    return range(rank, stage_count(schedule, pp), pp)


def split_layers(layers: int, stages: int, *, after: float = 0.0) -> list[range]:
    """Which layers each stage has, so that the slowest is as fast as can be.

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
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


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
