"""The stages of a pipeline, and the order in which they run micro-batches.

Papers: GPipe (Huang et al. 2019); 1F1B, plain and interleaved (Narayanan et al. 2021); zero bubble
(Qi et al. 2023).

How a decoder is divided into the stages of a pipeline.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

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
from pipelines.models.transformer import Transformer
from pipelines.parallel.division import stage_layers
from pipelines.parallel.gradients import local
from pipelines.parallel.layout import Schedule, check_micro_batches, stage_count, stage_numbers
from pipelines.parallel.mesh import Mesh


class Stage(PipelineStage):
    """torch runs a stage once to learn its shapes; routers have not routed any tokens by that."""

    def _prepare_backward_infra(self, *given: Any, **named: Any) -> Any:
        learnt = super()._prepare_backward_infra(*given, **named)
        for name, buffer in self.submod.named_buffers():
            if name.endswith("routes_E"):
                buffer.zero_()
        return learnt


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
            Stage(part, number, count, mesh.device, group=group)
            for part, number in zip(parts, stage_numbers(schedule, pp, rank), strict=True)
        ]
        self._is_first, self._is_last = stages[0].is_first, stages[-1].is_last
        self._schedule = _build(schedule, stages, micro_batches, loss)

    def step(self, rows: dict[str, Tensor], *, backward: bool = True) -> None:
        """Run all micro-batches forward, and backward unless told not to.

        Args:
            rows: Tensors by name, of all micro-batches, equally many rows each. The first stage
                reads `inputs_BS`, and each is given its rows of the others.
            backward: Whether to leave gradients.
        """
        others: dict[str, Any] = dict(rows)
        inputs = others.pop("inputs_BS")
        run = self._schedule.step if backward else self._schedule.eval
        with nullcontext() if backward else torch.no_grad():
            run(
                *([inputs] if self._is_first else []),
                target=others["targets_BS"] if self._is_last else None,
                return_outputs=False,
                **others,
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
    local(tensor).add_(other.to(tensor.device))  # that of offloaded weights is the CPU


def pipeline_parts(model: Transformer, mesh: Mesh, schedule: Schedule) -> list[Transformer]:
    """Return the stages of this process, of the modules of `model`.

    Raises:
        UserError: there are more stages than layers, or one has nothing to train.
    """
    pp = mesh.layout.pp
    stages = stages_of(model, pp, schedule)
    return [part_of(model, stages[n]) for n in stage_numbers(schedule, pp, mesh.coordinate("pp"))]


def stages_of(model: Transformer, pp: int, schedule: Schedule) -> tuple[range, ...]:
    """Return the layers of all stages.

    Raises:
        UserError: there are more stages than layers, or adapters that were loaded leave one out.
    """
    stages = stage_layers(model.config, stage_count(schedule, pp))
    for layers in stages:
        blocks = [model.layers[str(number)] for number in layers]
        if not any(each.requires_grad for block in blocks for each in block.parameters()):
            raise UserError(
                f"parallel.pp({pp}): the stage of layers {layers[0]} to {layers[-1]} has nothing "
                "to train, as adapter.init_from has no adapter there; lower parallel.pp"
            )
    return stages


def part_of(model: Transformer, layers: range) -> Transformer:
    """Return a part of the model: consecutive layers and what belongs to them, without a copy.

    Except the weight of a tied head that is parted from its embeddings.
    """
    with torch.device("meta"):
        part = Transformer(model.config, layers)
    part.layers = nn.ModuleDict({name: model.layers[name] for name in part.layers})
    part.rotary_2SR, part.local_rotary_2SR = model.rotary_2SR, model.local_rotary_2SR
    part.cross_entropy = model.cross_entropy
    if part.embed_tokens is not None:
        part.embed_tokens, part.embed_positions = model.embed_tokens, model.embed_positions
    if part.lm_head is not None:
        part.norm, part.lm_head = model.norm, model.lm_head
    if (copy := part.tied_copy) is not None:
        own = nn.Parameter(copy.detach().clone(), copy.requires_grad)
        part.get_submodule("lm_head").register_parameter("weight", own)
    return part
