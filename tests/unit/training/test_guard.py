from types import SimpleNamespace

import pytest
import torch

from pipelines.parallel.gradients import beside
from pipelines.training.guard import WINDOW, Guard, step_unless

CPU = torch.device("cpu")


def leave_out(guard: Guard, loss: float, norm: float = 1.0) -> float:
    return guard.leave_out(torch.tensor(loss), torch.tensor(norm)).item()


def warmed(sigma: float | None = 10.0) -> Guard:
    guard = Guard(sigma, CPU)
    for number in range(WINDOW):
        assert (
            leave_out(guard, 3.0 - number / WINDOW + 0.1 * (number % 3), 1 + 0.2 * (number % 2))
            == 0
        )
    return guard


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_left_out_from_the_first_step_on(bad: float) -> None:
    guard = Guard(None, CPU)
    assert [leave_out(guard, bad), leave_out(guard, 3.0, bad), leave_out(guard, 3.0)] == [1, 1, 0]
    verdict = guard.verdict()
    assert (verdict.loss, verdict.worst_run, verdict.left_out) == (3.0, 2, 2)


def test_a_spike_of_loss_or_norm_is_left_out_and_a_fall_is_not() -> None:
    guard = warmed()
    assert [leave_out(guard, 20.0), leave_out(guard, 2.0, 40.0), leave_out(guard, 0.5, 0.01)] == [
        1,
        1,
        0,
    ]
    assert guard.verdict().loss == 0.5


def test_spikes_are_none_before_the_window_is_full_and_without_a_bound() -> None:
    guard = Guard(10.0, CPU)
    assert not any(leave_out(guard, 1.0) for _ in range(WINDOW - 1))
    assert leave_out(guard, 100.0) == 0
    assert leave_out(warmed(None), 100.0) == 0


def test_a_level_that_lasts_becomes_the_usual_one() -> None:
    guard = warmed()
    verdicts = [leave_out(guard, 20.0) for _ in range(WINDOW)]
    assert verdicts[0] == 1
    assert verdicts[-1] == 0


def test_single_outliers_do_not_widen_the_bound() -> None:
    guard = warmed()
    for _ in range(20):
        assert [leave_out(guard, 1e6), leave_out(guard, 2.0)] == [1, 0]


def test_the_last_point_is_shown_where_none_was_good() -> None:
    guard = Guard(10.0, CPU)
    leave_out(guard, float("inf"), 2.0)
    verdict = guard.verdict()
    assert (verdict.last_loss, verdict.last_norm) == (float("inf"), 2.0)
    assert not verdict.any_good


def test_under_a_loss_scale_an_overflow_is_left_out_but_not_bad() -> None:
    guard = Guard(10.0, CPU, overflows=True)
    assert leave_out(guard, 3.0, float("inf")) == 1
    assert guard.verdict().left_out == 0
    assert leave_out(guard, float("nan"), float("nan")) == 1
    assert guard.verdict().left_out == 1


def test_gradients_that_overflow_at_any_scale_are_bad() -> None:
    guard = Guard(10.0, CPU, overflows=True)
    for _ in range(24):
        leave_out(guard, 3.0, float("nan"))
    assert guard.verdict().left_out == 0
    other = Guard(10.0, CPU, overflows=True)
    other.load_state_dict(guard.state_dict())
    for _ in range(5):
        leave_out(other, 3.0, float("nan"))
    assert other.verdict().worst_run == 5
    leave_out(other, 3.0, 1.0)
    leave_out(other, 3.0, float("inf"))
    assert other.verdict().left_out == 5


def test_a_restored_guard_leaves_out_as_the_one_that_was_saved() -> None:
    one, other = warmed(), Guard(10.0, CPU)
    leave_out(one, 20.0)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    for loss in (2.0, 2.5, 6.0, 2.0, float("nan"), 20.0):
        assert leave_out(one, loss) == leave_out(other, loss)
    assert other.verdict() == one.verdict()


def test_data_that_hurt_are_passed_over() -> None:
    guard = Guard(10.0, CPU)
    guard.go_back(4, [], 6)
    assert [guard.data_step(step) for step in (0, 3, 4, 5)] == [0, 3, 6, 7]
    guard.go_back(4, guard.skipped, 9)  # it came to step 7, and went back there again
    assert guard.skipped == [[4, 6], [6, 9]]
    assert [guard.data_step(step) for step in (3, 4, 5)] == [3, 9, 10]
    guard.go_back(8, guard.skipped, 20)
    assert [guard.data_step(step) for step in (7, 8)] == [12, 20]
    guard.go_back(2, guard.skipped, 30)  # the newer checkpoints are gone
    assert [guard.data_step(step) for step in (1, 2)] == [1, 30]


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_leaves_a_bad_step_out_whole(fused: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    parameter.grad = torch.ones(3)
    step_unless(torch.tensor(0.0), optimizer)
    before = parameter.detach().clone()
    moments = optimizer.state[parameter]["exp_avg"].clone()
    parameter.grad = torch.full((3,), float("nan"))
    step_unless(torch.tensor(1.0), optimizer)
    assert torch.equal(parameter, before)
    assert torch.equal(optimizer.state[parameter]["exp_avg"], moments)
    parameter.grad = torch.ones(3)
    step_unless(torch.tensor(0.0), optimizer)
    assert not torch.equal(parameter, before)


def test_an_offloaded_update_gets_its_scalars_with_one_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[str] = []
    event = SimpleNamespace(synchronize=lambda: waits.append("the host"))
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    scalars = torch.tensor(0.5), torch.tensor(1.0)
    there = beside(torch.zeros(1, device="meta"), *scalars)
    assert [each.device.type for each in there] == ["meta", "meta"]
    assert waits == ["the host"]
    assert beside(torch.zeros(1), *scalars) == scalars  # not offloaded: no further wait
    assert len(waits) == 1
