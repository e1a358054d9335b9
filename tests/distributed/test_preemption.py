"""One process of two is told to go: both save after the same step, and go on to the same bits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipelines.run.records import Split
from pipelines.training import preemption
from pipelines.training.checkpoint.store import CheckpointStore
from pipelines.training.metrics import StepMetrics
from pipelines.training.preemption import PreemptedError
from tests.distributed.pool import Pool
from tests.distributed.training import Case, build_trainer, make_data


def train(
    case: Case, data: tuple[Path, Split], checkpoints: Path, told: int | None, asked: int
) -> tuple[list[tuple[int, float]], float, str | None]:
    """Its curve, the sum of its weights, and how it ended; rank `told` is asked at a step."""
    preemption._NOTICE_S = 0.0
    points: list[StepMetrics] = []
    trainer = build_trainer(case, data, checkpoints, points, torch.float32)

    def report(metrics: StepMetrics) -> None:
        points.append(metrics)
        if metrics.step == asked and dist.get_rank() == told:
            preemption.ask(f"rank {told} has to go")

    trainer.report = report
    ended = None
    try:
        trainer.fit()
    except PreemptedError as error:
        ended = str(error).partition(" in ")[0]
    weights = sum(each.detach().double().sum() for each in trainer.model.modules[0].parameters())
    if isinstance(weights, torch.distributed.tensor.DTensor):
        weights = weights.full_tensor()
    return [(point.step, point.loss) for point in points], float(weights), ended


@pytest.mark.parametrize(
    "parallel", [{}, {"sharding": "full"}, {"tp": 2}, {"pp": 2}], ids=["dp", "fsdp", "tp", "pp"]
)
def test_all_save_after_the_same_step(
    pool: Callable[[int], Pool], tmp_path: Path, parallel: dict[str, object]
) -> None:
    case = Case("preemption", 2, parallel, {"steps": 10, "micro_batch_size": 4})
    (tmp_path / "data").mkdir()
    data = tmp_path / "data", make_data(tmp_path / "data")
    whole = pool(2).run(train, case, data, tmp_path / "whole", None, 0)
    first = pool(2).run(train, case, data, tmp_path / "cut", 1, 4)
    (saved,) = CheckpointStore(tmp_path / "cut").steps()
    assert saved in (5, 6)
    assert [ended for *_, ended in first] == [f"step {saved}: rank 1 has to go: saved"] * 2
    rest = pool(2).run(train, case, data, tmp_path / "cut", None, 0)
    for of_whole, of_first, of_rest in zip(whole, first, rest, strict=True):
        assert of_first[0] + of_rest[0] == of_whole[0]
        assert of_rest[1:] == of_whole[1:]
