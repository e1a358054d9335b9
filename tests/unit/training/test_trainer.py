from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.core.storage import MARKER
from pipelines.training.checkpoint.checkpointer import Position
from pipelines.training.checkpoint.store import CheckpointStore


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(
        torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items()
    )


def interrupted(run, after: int) -> None:
    """Train until the report of a step fails, as a machine may."""

    def fail(metrics) -> None:
        run.points.append(metrics)
        if metrics.step == after:
            raise InterruptedError

    run.trainer.report = fail
    with pytest.raises(InterruptedError):
        run.trainer.fit()


def test_the_loss_falls(start: Callable) -> None:
    run = start(steps=60, lr=0.01)
    position = run.trainer.fit()
    assert position.step == 60
    assert run.points[-1].loss < run.points[0].loss - 0.5
    assert [point.step for point in run.points] == list(range(1, 61))
    assert [point.last for point in run.points] == [False] * 59 + [True]
    assert run.points[-1].tokens == 60 * 6 * 16


def test_a_resumed_run_is_bit_identical(start: Callable) -> None:
    whole = start("whole")
    whole.trainer.fit()
    first = start("cut")
    interrupted(first, after=6)
    second = start("cut")
    second.trainer.fit()
    assert second.points[0].step == 5  # the last checkpoint was after step 4
    assert [(p.loss, p.gradient_norm) for p in second.points] == [
        (p.loss, p.gradient_norm) for p in whole.points[4:]
    ]
    assert same_weights(whole.model, second.model)


def test_a_torn_checkpoint_does_not_count(start: Callable, tmp_path: Path) -> None:
    start(steps=8).trainer.fit()
    checkpoints = CheckpointStore(tmp_path / "checkpoints")
    assert checkpoints.steps() == [4, 8]
    (Path(checkpoints.url(8)) / MARKER).unlink()
    assert checkpoints.steps() == [4]
    again = start(steps=8)
    again.trainer.fit()
    assert again.points[0].step == 5
    assert checkpoints.steps() == [4, 8]


def test_the_last_checkpoints_are_kept(start: Callable, tmp_path: Path) -> None:
    start(checkpoint_every=2, keep_checkpoints=3).trainer.fit()
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-000006", "step-000008", "step-000010"]


def test_a_finished_run_only_loads(start: Callable) -> None:
    first = start()
    first.trainer.fit()
    again = start()
    assert again.trainer.fit().step == 10
    assert not again.points
    assert same_weights(first.model, again.model)


def test_accumulation_changes_nothing_but_the_order_of_sums(start: Callable) -> None:
    losses = []
    for number, micro in enumerate((6, 3, 2, 1)):
        run = start(f"c{number}", micro_batch_size=micro, steps=5)
        run.trainer.fit()
        losses.append([point.loss for point in run.points])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_the_time_limit_counts_over_a_resumption(start: Callable) -> None:
    first = start(steps=100_000, max_seconds=0.3)
    position = first.trainer.fit()
    assert position.step < 100_000
    assert position.seconds >= 0.3
    assert first.points[-1].last
    assert start(steps=100_000, max_seconds=0.3).trainer.fit() == position


def test_only_the_first_process_looks_at_the_clock(start: Callable) -> None:
    trainer = start(max_seconds=1.0).trainer
    for rank in (0, 1):
        trainer.mesh = SimpleNamespace(rank=rank)
        assert trainer._end_by_clock(Position(3, 5.0)) == (3 if rank == 0 else None)


def ten_a_second(run: Any) -> Any:
    """Have the clock count each step as 0.1 s, as a busy machine may take long for its first."""
    schedule = run.trainer.schedule
    run.trainer._end_by_clock = lambda now: schedule.end_by_clock(now.step, now.step / 10)
    return run


def test_the_rate_decays_by_the_clock_and_the_run_can_be_repeated(start: Callable) -> None:
    timed = {"steps": 100_000, "lr_schedule": "wsd", "min_lr_ratio": 0.0}
    first = ten_a_second(start("timed", **timed, max_seconds=2.0))
    steps = first.trainer.fit().step
    assert steps >= 20
    before = first.points[steps // 2 - 2]
    assert (before.last_step, before.learning_rate) == (100_000, first.trainer.train.lr)
    assert first.points[-1].last_step == steps < 100_000
    assert first.points[-1].learning_rate < 3 / steps * first.trainer.train.lr
    again = start("again", **timed, last_step=steps)
    assert again.trainer.fit().step == steps
    assert same_weights(first.model, again.model)


def test_a_run_that_stops_while_its_rate_decays_ends_after_the_step_chosen(start: Callable) -> None:
    timed = {"steps": 100_000, "lr_schedule": "wsd", "max_seconds": 2.0, "checkpoint_every": 1}
    first = ten_a_second(start(**timed))
    chosen = first.trainer.fit().step
    store = first.trainer.checkpoints._store
    store.remove(chosen)  # as if it had been stopped before
    assert chosen // 2 < store.steps()[-1] < chosen
    rest = start(**timed)
    assert rest.trainer.fit().step == chosen
    assert same_weights(first.model, rest.model)


def test_bf16_trains(start: Callable) -> None:
    run = start(steps=30, lr=0.01, precision="bf16")
    run.trainer.fit()
    assert run.points[-1].loss < run.points[0].loss
    assert all(parameter.dtype == torch.float32 for parameter in run.model.parameters())


def test_a_loss_that_is_no_number_stops_the_run(start: Callable, tmp_path: Path) -> None:
    run = start()
    run.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(
        UserError, match=r"loss is nan at step 5, the gradient norm nan; lower train\.lr"
    ):
        run.trainer.fit()
    assert CheckpointStore(tmp_path / "checkpoints").steps() == []
