"""What processes that work together tell of themselves."""

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipelines.run.records import Split
from pipelines.training.machine_report import machine_report
from pipelines.training.metrics import StepMetrics
from pipelines.training.profiling import StepProfiler
from tests.distributed.pool import Pool
from tests.distributed.training import Case, build_trainer, make_data


def train(
    case: Case, data: tuple[Path, Split], checkpoints: Path, late: float
) -> tuple[list[float | None], dict[str, Any]]:
    """The shares of communication, where rank 1 is late to each step; and the machine."""
    points: list[StepMetrics] = []
    trainer = build_trainer(case, data, checkpoints, points, torch.float32)
    steps, folder = trainer.train.profile_steps, checkpoints.parent / "profile"
    trainer.profiler = StepProfiler(steps, folder, dist.get_rank(), dist.get_world_size())
    micro_batches = trainer.loader.micro_batches

    def slow(step: int) -> Any:
        time.sleep(late * dist.get_rank())
        return micro_batches(step)

    trainer.loader.micro_batches = slow  # type: ignore[method-assign]
    trainer.fit()
    machine = machine_report(trainer.mesh, trainer.meter.hardware)
    return [point.communication_share for point in points], machine


def test_who_waits_for_another_talks_and_all_leave_a_trace(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    settings = {"steps": 6, "profile_steps": [2, 4]}
    case = Case("observation", 2, {}, {}, settings)
    data = tmp_path / "data"
    data.mkdir()
    (quick, machine), (late, _) = pool(2).run(
        train, case, (data, make_data(data)), tmp_path / "checkpoints", 0.3
    )
    assert quick[:3] == late[:3] == [None] * 3
    assert quick[3] is not None and late[3] is not None
    assert quick[3] == quick[5] > 0.5
    assert late[3] < quick[3]
    for rank in range(2):
        trace = gzip.decompress((tmp_path / "profile" / f"rank-{rank}.json.gz").read_bytes())
        names = {event.get("name") for event in json.loads(trace)["traceEvents"]}
        assert "gloo:all_reduce" in names
    assert machine["backend"] == "gloo"
    assert machine["layout"]["dp_replicate"] == 2
