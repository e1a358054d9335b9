"""The pipeline by itself: stages that sleep wait as long as the schedule's formula says."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipelines.parallel.layout import Layout, Schedule, stage_numbers
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.pipeline_parallel import Pipeline
from tests.distributed.pool import Pool

MICRO_BATCHES = 4
SECONDS = 0.2  # of a process for a micro-batch's forward pass; backward takes twice that


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A stage that works so long, and needs no processor for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = seconds

    def forward(self, x: Tensor, targets_BS: Tensor) -> Tensor:
        return _Sleep.apply(x * self.weight, self.seconds)


def fastest_step(schedule: Schedule) -> float:
    """Seconds of the fastest of three steps, as long as the slowest process of each."""
    pp = dist.get_world_size()
    mesh = build_mesh(Layout(pp=pp), torch.device("cpu"))
    numbers = stage_numbers(schedule, pp, mesh.coordinate("pp"))
    parts = [Sleeper(0) for _ in numbers]
    pipeline = Pipeline(parts, mesh, schedule, MICRO_BATCHES, lambda out, target: out.sum())
    given = dict.fromkeys(("inputs_BS", "targets_BS"), torch.ones(MICRO_BATCHES, 1))
    pipeline.step(given)  # learns the shapes
    for part in parts:
        part.seconds = SECONDS / len(numbers)
    steps = []
    for _ in range(3):
        dist.barrier()
        started = time.perf_counter()
        pipeline.step(given)
        seconds = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        steps.append(seconds.item())
    return min(steps)


@pytest.mark.parametrize(
    ("schedule", "pp", "stages_each"),
    [
        ("1f1b", 2, 1),
        pytest.param("gpipe", 2, 1, marks=pytest.mark.parity),
        pytest.param("gpipe", 4, 1, marks=pytest.mark.parity),
        pytest.param("1f1b", 4, 1, marks=pytest.mark.parity),
        pytest.param("interleaved_1f1b", 4, 2, marks=pytest.mark.parity),
    ],
)
def test_the_bubble_is_that_of_the_formula(
    schedule: Schedule, pp: int, stages_each: int, pool: Callable[[int], Pool]
) -> None:
    step = max(pool(pp).run(fastest_step, schedule))
    bubble = 1 - MICRO_BATCHES * 3 * SECONDS / step
    # (p - 1) / (m + p - 1), and with v stages a process each waits 1 / v as long.
    formula = (pp - 1) / (stages_each * MICRO_BATCHES + pp - 1)
    assert bubble == pytest.approx(formula, rel=0.1)
