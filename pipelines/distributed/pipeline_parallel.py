"""Layers as the stages of a pipeline, and the order in which stages run micro-batches.

Papers: GPipe (Huang et al. 2019); 1F1B, plain and interleaved (Narayanan et al. 2021); zero bubble
(Qi et al. 2023).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from pipelines.core.errors import UserError
from pipelines.distributed.gradients import local
from pipelines.distributed.mesh import Mesh

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


class Pipeline:
    """This process's stages, joined to those of the others."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        mesh: Mesh,
        schedule: Schedule,
        micro_batches: int,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """All processes call it alike.

        Args:
            parts: Of the stages that `stage_numbers` gives this process; each maps the output of
                the one before it, and inputs by name.
            mesh: Its `pp` processes form the pipeline.
            schedule: The order.
            micro_batches: In a step.
            loss: Of the last stage's output for a micro-batch, and of its targets; steps leave
                the gradient of the losses' sum.
        """
        pp = mesh.layout.pp
        check_micro_batches(schedule, pp, micro_batches)
        line = mesh.along("pp")
        group = None if line is None else line.get_group()
        count, rank = stage_count(schedule, pp), mesh.coordinate("pp")
        stages = [
            PipelineStage(part, number, count, mesh.device, group=group)
            for part, number in zip(parts, stage_numbers(schedule, pp, rank), strict=True)
        ]
        self._is_first, self._is_last = stages[0].is_first, stages[-1].is_last
        self._schedule = _build(schedule, stages, micro_batches, loss)

    def step(self, inputs: Tensor, targets: Tensor, **by_name: Any) -> None:
        """Run all micro-batches forward and backward.

        Args:
            inputs: Rows of all micro-batches, equally many each; the first stage reads them.
            targets: Likewise; what the loss reads.
            by_name: Likewise tensors; each stage is given its rows.
        """
        self._schedule.step(
            *([inputs] if self._is_first else []),
            target=targets if self._is_last else None,
            return_outputs=False,
            **by_name,
        )


def _build(
    schedule: Schedule,
    stages: list[Any],
    number: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble:
    # The losses are sums, so there is no mean over micro-batches to take: no scaling.
    match schedule:
        case "gpipe":
            return ScheduleGPipe(stages[0], number, loss, scale_grads=False)
        case "1f1b":
            return Schedule1F1B(stages[0], number, loss, scale_grads=False)
        case "interleaved_1f1b":
            return ScheduleInterleaved1F1B(stages, number, loss, scale_grads=False)
        case "zero_bubble":
            return ScheduleInterleavedZeroBubble(stages, number, loss, scale_grads=False)


@torch.no_grad()
def add_over_ends(tensor: Tensor, mesh: Mesh) -> None:
    """Sum, in place, over the first and the last process of a pipeline; only these two call it.

    Both get the same bits, as a + b is b + a. As Megatron-LM does with the gradient of embeddings
    that are tied to the head.
    """
    line = mesh.along("pp")
    if line is None:
        return
    group = line.get_group()
    peer = dist.get_global_rank(group, 0 if mesh.coordinate("pp") else mesh.layout.pp - 1)
    mine = local(tensor).to(mesh.device).contiguous()
    other = torch.empty_like(mine)
    exchange = [
        dist.P2POp(dist.isend, mine, peer, group),
        dist.P2POp(dist.irecv, other, peer, group),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    local(tensor).add_(other)
