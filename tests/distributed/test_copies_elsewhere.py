"""Two processes whose disk is lost go on from the copies that the first one made, to the bit."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipelines.run.records import Split
from pipelines.training.checkpoint.further_places import FurtherPlace
from pipelines.training.checkpoint.store import CheckpointStore
from pipelines.training.hooks import Events
from pipelines.training.metrics import StepMetrics
from tests.distributed.pool import Pool
from tests.distributed.training import Case, build_trainer, make_data


def train(
    case: Case, data: tuple[Path, Split], checkpoints: Path, further: str, steps: int
) -> list[tuple[int, float, float]]:
    """The curve up to a step, after which the run is cut off; the copies end first."""
    points: list[StepMetrics] = []
    trainer = build_trainer(case, data, checkpoints, points, torch.float32)
    if dist.get_rank() == 0:
        store = CheckpointStore(checkpoints)
        store.claim("run")
        trainer.checkpoints.further = (FurtherPlace(further, store, 2, 1, Events()),)

    def report(metrics: StepMetrics) -> None:
        points.append(metrics)
        if metrics.step == steps and not metrics.last:
            trainer.checkpoints.wait()
            trainer.checkpoints.finish_further()
            raise InterruptedError

    trainer.report = report
    with suppress(InterruptedError):
        trainer.fit()
    return [(each.step, each.loss, each.gradient_norm) for each in points]


@pytest.mark.parametrize("parallel", [{}, {"sharding": "full"}], ids=["dp", "fsdp"])
def test_a_run_goes_on_from_a_copy(
    pool: Callable[[int], Pool], tmp_path: Path, parallel: dict[str, object]
) -> None:
    train_options = {"steps": 10, "checkpoint_every": 2, "micro_batch_size": 4}
    case = Case("copies", 2, parallel, train_options)
    (tmp_path / "data").mkdir()
    data = tmp_path / "data", make_data(tmp_path / "data")
    whole = pool(2).run(train, case, data, tmp_path / "whole", str(tmp_path / "a"), 10)
    first = pool(2).run(train, case, data, tmp_path / "cut", str(tmp_path / "b"), 7)
    shutil.rmtree(tmp_path / "cut")
    rest = pool(2).run(train, case, data, tmp_path / "cut", str(tmp_path / "b"), 10)
    for of_whole, of_first, of_rest in zip(whole, first, rest, strict=True):
        assert of_first == of_whole[:7]
        assert of_rest == of_whole[6:]
