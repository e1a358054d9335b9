"""A batch that hurts one process: all leave the step out, and all go back."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipelines.run.records import Split
from pipelines.training.metrics import StepMetrics
from tests.distributed.pool import Pool
from tests.distributed.training import Case, build_trainer, make_data


def train(
    case: Case, data: tuple[Path, Split], checkpoints: Path, bad: set[int]
) -> tuple[list[tuple[int, int, float]], list[list[int]], float]:
    """Rank 1's loss is no number at some of the data's steps."""
    points: list[StepMetrics] = []
    trainer = build_trainer(case, data, checkpoints, points, torch.float32)
    now = 0
    micro_batches = trainer.loader.micro_batches

    def noted(step: int) -> Any:
        nonlocal now
        now = step
        return micro_batches(step)

    def spoil(_module: Any, _inputs: Any, nats: torch.Tensor) -> torch.Tensor:
        return nats * (math.nan if now in bad and dist.get_rank() == 1 else 1.0)

    trainer.loader.micro_batches = noted  # type: ignore[method-assign]
    trainer.model.modules[0].register_forward_hook(spoil)
    trainer.fit()
    weights = sum(each.detach().double().sum() for each in trainer.parameters)
    curve = [(point.step, point.steps_left_out, point.loss) for point in points]
    return curve, trainer.guard.skipped, float(weights)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_one_process_with_a_bad_batch(
    pool: Callable[[int], Pool], tmp_path: Path, sharding: str
) -> None:
    settings = {"checkpoint_every": 4, "max_bad_steps": 2, "steps": 10}
    case = Case("recovery", 2, {"sharding": sharding}, settings)
    (tmp_path / "data").mkdir()
    data = tmp_path / "data", make_data(tmp_path / "data")
    one, other = pool(2).run(train, case, data, tmp_path / "checkpoints", {1, 6, 7})
    assert one[:2] == other[:2]
    curve, skipped, _ = one
    assert skipped == [[4, 8]]
    assert [step for step, _, _ in curve] == [*range(1, 8), *range(5, 11)]
    assert [left_out for _, left_out, _ in curve][-1] == 1  # those before the way back don't count
    assert all(math.isfinite(loss) for _, _, loss in curve)
    if sharding == "none":
        assert one[2] == other[2]
