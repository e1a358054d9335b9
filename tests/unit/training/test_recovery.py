"""Batches that hurt, through the real trainer."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.training.guard import WINDOW
from tests.unit.training.conftest import Noted

NAN = float("nan")


class Poisoned:
    """A run whose loss is multiplied by something at some of the data's steps.

    Attributes:
        used: The data's steps in the order in which they were trained with.
    """

    def __init__(self, run: Any, poison: dict[int, float]) -> None:
        self.run = run
        self.used: list[int] = []
        micro_batches = run.trainer.loader.micro_batches

        def noted(step: int) -> Iterator[Any]:
            self.used.append(step)
            return micro_batches(step)

        def spoil(_module: Any, _inputs: Any, nats: torch.Tensor) -> torch.Tensor:
            return nats * poison.get(self.used[-1], 1.0)

        run.trainer.loader.micro_batches = noted
        run.model.register_forward_hook(spoil)

    def fit(self) -> "Poisoned":
        self.run.trainer.fit()
        return self

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in self.run.model.parameters()])

    @property
    def curve(self) -> list[dict[str, float]]:
        return [point.curve_point() for point in self.run.points]


def test_a_step_that_is_no_number_changes_nothing_and_the_run_goes_on(start: Callable) -> None:
    run = Poisoned(start(checkpoint_every=100), {3: NAN})
    seen: list[torch.Tensor] = []
    report = run.run.trainer.report
    run.run.trainer.report = lambda point: (seen.append(run.weights), report(point))
    run.fit()
    assert run.used == list(range(10))
    assert torch.equal(seen[3], seen[2])
    assert not torch.equal(seen[4], seen[3])
    assert [point["steps_left_out"] for point in run.curve] == [0] * 3 + [1] * 7
    assert run.curve[3]["loss"] == run.curve[2]["loss"]  # the last that counted
    assert all(torch.isfinite(torch.tensor(point["loss"])) for point in run.curve)


def test_a_spike_is_left_out(start: Callable) -> None:
    bad = WINDOW + 5
    settings = {"steps": bad + 3, "checkpoint_every": 1000, "micro_batch_size": 6, "lr": 1e-4}
    run = Poisoned(start(**settings), {bad: 30.0}).fit()
    assert run.run.points[-1].steps_left_out == 1
    careless = Poisoned(start("other", spike_sigma=None, **settings), {bad: 30.0}).fit()
    assert careless.run.points[-1].steps_left_out == 0
    assert careless.run.points[bad].loss > 10 * run.run.points[bad].loss


def test_after_several_the_run_goes_back_and_on_with_other_data(
    start: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    poison = {6: NAN, 7: NAN}
    begun = start(max_bad_steps=2)
    begun.trainer.events = noted = Noted()
    with caplog.at_level(logging.WARNING):
        run = Poisoned(begun, poison).fit()
    # Saved after step 4, so the data since then go, as in PaLM.
    assert run.used == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert [point["step"] for point in run.curve] == [*range(1, 8), *range(5, 11)]
    assert "2 bad steps in a row up to step 8 (loss nan, gradient norm nan): went back to" in (
        caplog.text
    )
    (entry,) = noted.entries
    assert (noted.kinds, entry["step"]) == (["rollback"], 8)
    assert entry["done"] == "went back to step 4, and goes on with other data"
    assert entry["seconds_lost"] > 0
    clean = start("clean", max_bad_steps=2)
    clean.trainer.guard.skipped = [[4, 8]]
    assert torch.equal(Poisoned(clean, {}).fit().weights, run.weights)


@pytest.mark.parametrize("after", [7, 9])
def test_a_run_that_went_back_resumes_to_the_bit(start: Callable, after: int) -> None:
    settings = {"max_bad_steps": 2, "steps": 14}
    poison = {6: NAN, 7: NAN, 12: NAN}
    whole = Poisoned(start("whole", **settings), poison).fit()

    first = Poisoned(start("cut", **settings), poison)
    report = first.run.trainer.report

    def die(point: Any) -> None:
        report(point)
        if point.step == after:
            raise InterruptedError

    first.run.trainer.report = die
    with pytest.raises(InterruptedError):
        first.fit()
    second = Poisoned(start("cut", **settings), poison).fit()
    assert torch.equal(second.weights, whole.weights)
    assert second.curve == whole.curve[-len(second.curve) :]
    assert second.used == whole.used[-len(second.used) :]


def test_a_run_goes_back_so_often_and_then_says_why_it_ends(start: Callable) -> None:
    poison = dict.fromkeys(range(6, 100), NAN)
    run = Poisoned(start(max_bad_steps=2, max_rollbacks=2), poison)
    line = (
        r"^the loss is nan at step 6, the gradient norm nan after going back to a checkpoint 2 "
        r"times; lower train\.lr\(0\.003\) or raise train\.warmup_steps\(2\)$"
    )
    with pytest.raises(UserError, match=line):
        run.fit()


def test_without_a_checkpoint_to_go_back_to_the_run_ends(start: Callable) -> None:
    run = Poisoned(start(max_bad_steps=2, checkpoint_every=100), {1: NAN, 2: NAN})
    with pytest.raises(UserError, match=r"^the loss is nan at step 3, the gradient norm nan; "):
        run.fit()


def test_a_run_of_which_no_step_was_good_ends_with_its_line(start: Callable) -> None:
    with pytest.raises(UserError, match="the loss is nan at step 3"):
        Poisoned(start(steps=3), dict.fromkeys(range(3), NAN)).fit()
