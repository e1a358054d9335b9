"""Real processes, one of which is slow: it is named with what it is slow in, and nobody else."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pipelines.run.records import Split
from pipelines.training.machines import Machines
from tests.distributed.pool import Pool
from tests.distributed.training import Case, build_trainer, make_data
from tests.unit.training.conftest import Noted

STEPS = 24
MODEL = {"layers": 4, "width": 64, "hidden": 256}
TRAIN = {"steps": STEPS, "log_every": 4, "global_batch_size": 16, "micro_batch_size": 4}
LAYOUTS = {
    "ddp": (2, {}),
    "zero-1": (2, {"sharding": "optimizer", "dp_shard": 2}),
    "zero-3": (2, {"sharding": "full", "dp_shard": 2}),
    "tensor": (2, {"tp": 2}),
    "pipeline": (4, {"pp": 2}),
    "four": (4, {}),
}
MARKED = ["ddp", *(pytest.param(each, marks=pytest.mark.parity) for each in [*LAYOUTS][1:])]


def busy(seconds: float) -> None:
    """Compute for some processor time."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


def slow_blocks(trainer: Any) -> None:
    """Make each block work 1.5 times as long, forward and backward."""
    for part in trainer.model.modules:
        for block in part.layers.values():

            def longer(*arguments: Any, forward: Any = block.forward) -> Any:
                began = time.thread_time()
                result = forward(*arguments)
                busy(1.5 * (time.thread_time() - began))  # a backward pass takes two forward
                return result

            block.forward = longer


class ShareOfAStep:
    """Seconds in each call that are worth telling, however long steps take on a busy machine."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, least: float) -> float:
        now = time.perf_counter()
        seconds, self._last = max(least, 0.3 * (now - self._last)), now
        return min(seconds, 1.0)


def slow_loader(trainer: Any) -> None:
    """Make the loader late."""
    micro_batches, share = trainer.loader.micro_batches, ShareOfAStep()

    def late(step: int) -> Any:
        time.sleep(share(0.03))
        return micro_batches(step)

    trainer.loader.micro_batches = late


def slow_optimizer(trainer: Any) -> None:
    """Make the update of the weights work longer."""
    share = ShareOfAStep()
    trainer.optimizer.register_step_pre_hook(lambda *_: busy(share(0.01)))


FAULTS = {
    "forward and backward": slow_blocks,
    "data": slow_loader,
    "optimizer": slow_optimizer,
}


class Rooms(Machines):
    """Machines that have room for each other's processes, or have none."""

    def __init__(self, *, have_room: bool, are_mixed: bool = False) -> None:
        self.have_room, self.are_mixed = have_room, are_mixed
        self.left: list[tuple[str, str]] = []

    def here(self) -> str:
        return f"machine-{dist.get_rank()}"

    def leave(self, machine: str, reason: str) -> bool:
        self.left.append((machine, reason))
        return self.have_room


def train(
    case: Case,
    data: tuple[Path, Split],
    checkpoints: Path,
    slow: int | None,
    phase: str,
    machines: Machines | None = None,
) -> list[dict[str, Any]]:
    """What is noted in a run in which a rank may be slow."""
    trainer = build_trainer(case, data, checkpoints, [], torch.float32)
    trainer.stragglers.machines = machines or Machines()
    events = Noted()
    trainer.stragglers._events = events
    if dist.get_rank() == slow:
        FAULTS[phase](trainer)
    with patch("socket.gethostname", lambda: f"host-{dist.get_rank()}"):
        trainer.fit()
    return [
        entry | {"kind": kind} for kind, entry in zip(events.kinds, events.entries, strict=True)
    ]


def train_on(
    machines: Rooms, *arguments: Any
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """What is noted, and who was to leave, where any time is too long to be held up."""
    kind = f"kind {dist.get_rank()}" if machines.are_mixed else "one kind"
    with (
        patch("pipelines.training.stragglers.TOO_LONG_S", 1e-4),
        patch("pipelines.training.stragglers.hardware_kind", lambda _: kind),
    ):
        return train(*arguments, machines=machines), machines.left


def noted(
    pool: Callable[[int], Pool], layout: str, folder: Path, slow: int | None, phase: str = ""
) -> list[dict[str, Any]]:
    """What rank 0 notes; the others note nothing."""
    world, parallel = LAYOUTS[layout]
    data = folder / "data"
    data.mkdir()
    case = Case("stragglers", world, parallel, TRAIN, model=MODEL)
    first, *others = pool(world).run(
        train, case, (data, make_data(data)), folder / "checkpoints", slow, phase
    )
    assert not any(others)
    return first


@pytest.mark.parametrize("layout", MARKED)
def test_nobody_is_named_where_all_are_equally_fast(
    layout: str, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    assert noted(pool, layout, tmp_path, None) == []


@pytest.mark.parametrize("layout", MARKED)
@pytest.mark.parametrize("phase", FAULTS)
def test_the_slow_one_is_named(
    layout: str, phase: str, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    slow = LAYOUTS[layout][0] - 1
    (entry,) = noted(pool, layout, tmp_path, slow, phase)
    assert entry["kind"] == "slow rank"
    assert entry["cause"].startswith(f"rank {slow} on host-{slow} (CPU) ")
    assert f"is slow since step {entry['step']}: {phase} takes" in entry["cause"]


def left(
    pool: Callable[[int], Pool], folder: Path, machines: Rooms
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """What rank 0 notes of a slow rank 1, and who was to leave; the others do neither."""
    data = folder / "data"
    data.mkdir()
    case = Case("stragglers", 2, {}, TRAIN, model=MODEL)
    arguments = case, (data, make_data(data)), folder / "checkpoints", 1, "data"
    first, others = pool(2).run(train_on, machines, *arguments)
    assert others == ([], [])
    return first


@pytest.mark.parametrize("have_room", [True, False])
def test_who_holds_the_others_up_too_long_leaves_if_other_machines_have_room(
    have_room: bool, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    entries, gone = left(pool, tmp_path, Rooms(have_room=have_room))
    assert {machine for machine, _ in gone} == {"machine-1"}
    assert gone[0][1].startswith("rank 1 on host-1 (CPU) has held the others up for ")
    told = [entry for entry in entries if "takes no more work" in entry["done"]]
    assert len(told) == (len(gone) if have_room else 0)


def test_nobody_leaves_where_hardware_is_mixed(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    (named,), gone = left(pool, tmp_path, Rooms(have_room=True, are_mixed=True))
    assert named["kind"] == "slow rank"
    assert gone == []
