"""Processes die without notice, machines are lost: at most one step is, and the bits are the same.

A machine's memory is a folder here.
"""

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipelines.run.records import Split
from pipelines.training.checkpoint import step_copies
from pipelines.training.checkpoint.step_copies import StepCopies
from pipelines.training.metrics import StepMetrics
from tests.distributed.pool import Pool
from tests.distributed.training import Case, build_trainer, small

STEPS = 8
Data = tuple[Path, Split]
ZERO_3 = {"sharding": "full"}


def train(
    case: Case,
    data: Data,
    folder: Path,
    machines: list[str],
    dies: Callable[[int, int], object] | None = None,
) -> tuple[list[tuple[int, float]], float]:
    """Each point's step and loss, and the sum of this process's weights; `dies` is told steps."""
    step_copies.MEMORY = folder / machines[dist.get_rank()]
    step_copies.MEMORY.mkdir(parents=True, exist_ok=True)
    points: list[StepMetrics] = []
    trainer = build_trainer(case, data, folder / "checkpoints", points, torch.float32)

    def report(metrics: StepMetrics) -> None:
        points.append(metrics)
        with (folder / "steps").open("a") as file:
            file.write(f"{metrics.step}\n")
        if dies is not None:
            dies(dist.get_rank(), metrics.step)

    trainer.report = report
    trainer.fit()
    weights = [each.detach().double().sum() for each in trainer.model.modules[0].parameters()]
    here = [each.to_local() if hasattr(each, "to_local") else each for each in weights]
    return [(point.step, point.loss) for point in points], float(sum(here))


def killed(step: int, who: int, seconds: float, rank: int, now: int) -> None:
    """End a process as SIGKILL would, some time after a step."""
    if (rank, now) == (who, step):
        threading.Thread(target=lambda: (time.sleep(seconds), os._exit(9))).start()


def slowly(seconds: float, *arguments: Any) -> Any:
    """Train where rank 1 takes long to write its copies."""
    write = StepCopies._write

    def late(self: StepCopies, *of: Any) -> None:
        time.sleep(seconds * dist.get_rank())
        write(self, *of)

    StepCopies._write = late  # type: ignore[method-assign]
    try:
        return train(*arguments)
    finally:
        StepCopies._write = write  # type: ignore[method-assign]


def copied(case: Case) -> Case:
    settings = {"steps": STEPS, "copy_every": 1, "checkpoint_every": 100}
    return small(Case(case.name, case.world, case.parallel, {**settings, **case.train}))


def until_death(pool: Pool, *arguments: Any) -> None:
    with pytest.raises(RuntimeError):
        pool.run(*arguments)
    pool.close()  # one of its processes is gone


def begun(folder: Path) -> int:
    """The last step that any process has done so far; forgotten."""
    steps = [int(line) for line in (folder / "steps").read_text().split()]
    (folder / "steps").unlink()
    return max(steps)


# Replicas are on two machines, of which the second is lost; or all processes on one.
LAYOUTS = [
    (Case("ddp", 2, {}), ["a", "b"], True),
    (Case("ddp, 8 bits", 2, {}, {"optimizer": "adamw_8bit"}), ["a", "b"], True),
    (Case("zero-1", 2, {"sharding": "optimizer"}), ["a", "a"], False),
    (Case("zero-3", 2, ZERO_3), ["a", "a"], False),
    (Case("zero-3, muon", 2, ZERO_3, {"optimizer": "muon"}), ["a", "a"], False),
    (Case("tp", 2, {"tp": 2}), ["a", "a"], False),
    (Case("pp", 2, {"pp": 2}), ["a", "a"], False),
    (Case("hsdp", 4, {**ZERO_3, "dp_replicate": 2, "dp_shard": 2}), ["a", "a", "b", "b"], True),
    (Case("tp, two replicas", 4, {"tp": 2}), ["a", "a", "b", "b"], True),
    (Case("pp, two replicas", 4, {"pp": 2}), ["a", "b", "a", "b"], True),
]


@pytest.mark.parametrize(
    ("case", "machines", "loses"),
    [
        pytest.param(*each, id=each[0].name, marks=[] if n == 0 else [pytest.mark.parity])
        for n, each in enumerate(LAYOUTS)
    ],
)
def test_a_process_dies_and_its_machine_may_be_lost(
    pool: Callable[[int], Pool],
    data: Data,
    tmp_path: Path,
    case: Case,
    machines: list[str],
    loses: bool,
) -> None:
    case, draw = copied(case), random.Random(case.name)
    whole = pool(case.world).run(train, case, data, tmp_path / "whole", machines)
    cut = tmp_path / "cut"
    step, who = draw.randrange(2, STEPS - 1), draw.randrange(case.world)
    dies = partial(killed, step, who, draw.random() / 20)
    until_death(pool(case.world), train, case, data, cut, machines, dies)
    if loses:
        shutil.rmtree(cut / "b")
        machines = [{"a": "a", "b": "new"}[each] for each in machines]
    done = begun(cut)
    assert step <= done < STEPS
    rest = pool(case.world).run(train, case, data, cut, machines)
    for (points, weights), (whole_points, whole_weights) in zip(rest, whole, strict=True):
        assert points[0][0] >= done
        assert points == whole_points[points[0][0] - 1 :]
        assert weights == whole_weights
    assert not [path for path in cut.rglob("*.safetensors") if path.parent.parent.name != "b"]


@pytest.mark.parity
def test_shards_of_a_lost_machine_come_from_the_checkpoint(
    pool: Callable[[int], Pool], data: Data, tmp_path: Path
) -> None:
    case = copied(Case("zero-3", 2, ZERO_3, {"checkpoint_every": 3}))
    whole = pool(2).run(train, case, data, tmp_path / "whole", ["a", "b"])
    dies = partial(killed, 6, 1, 0.0)
    until_death(pool(2), train, case, data, tmp_path / "cut", ["a", "b"], dies)
    shutil.rmtree(tmp_path / "cut" / "b")
    rest = pool(2).run(train, case, data, tmp_path / "cut", ["a", "new"])
    assert [points[0][0] for points, _ in rest] in ([4, 4], [7, 7])
    assert [points[-1] for points, _ in rest] == [points[-1] for points, _ in whole]


@pytest.mark.parity
@pytest.mark.parametrize("waits", [True, False])
def test_a_step_ends_only_when_all_have_written_the_one_before(
    pool: Callable[[int], Pool],
    data: Data,
    tmp_path: Path,
    waits: bool,
) -> None:
    """Rank 1 needs long for its copies, and dies before it has written one; without the wait, rank
    0 has none of that step left.
    """
    case = copied(Case("zero-3", 2, ZERO_3))
    arguments = case, data, tmp_path, ["a", "a"]
    trains = slowly if waits else without_wait
    until_death(pool(2), trains, 0.5, *arguments, partial(killed, 5, 1, 0.0))
    done = begun(tmp_path)
    rest = pool(2).run(train, *arguments)
    first = rest[0][0][0][0]
    assert (first >= done) == waits


def without_wait(*arguments: Any) -> Any:
    from pipelines.training.checkpoint.checkpointer import Checkpoints

    Checkpoints.before_sums = lambda self, step: None  # type: ignore[method-assign] # the process dies
    return slowly(*arguments)
