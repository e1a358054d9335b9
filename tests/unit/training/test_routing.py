"""A mixture of experts through the real trainer: what its routers do is seen and bounded."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelines.core.errors import UserError
from tests.unit.training import conftest
from tests.unit.training.conftest import Noted

EXPERTS = {"experts": 4, "experts_per_token": 1}
DEEPSEEK = {"sigmoid_router": True, "first_k_dense_replace": 1, "dense_hidden": 24}


@pytest.fixture(autouse=True)
def experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "SHAPE", replace(conftest.SHAPE, **EXPERTS))


def favour(run: Any) -> None:
    """Make the second layer send every token to its third expert."""

    def always(router: Any, _inputs: Any, routed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        experts, weights, routes = routed
        router.routes_E.zero_()
        router.routes_E[2] = experts.numel()
        skewed = torch.zeros_like(routes)
        skewed[:, 2] = experts[0].numel()
        return torch.full_like(experts, 2), weights, skewed

    run.model.layers["1"].mlp.router.register_forward_hook(always)


def test_the_curves_tell_how_tokens_are_spread(start: Callable) -> None:
    run = start(balance_loss=0.0)
    run.trainer.fit()
    curves = run.points[-1].curves()
    for layer in ("00", "01"):
        seen = f"train/experts_of_layer_{layer}"
        assert 1 / 4 <= curves[f"{seen}/largest_share"] <= 1
        assert 0 <= curves[f"{seen}/smallest_share"] <= 1 / 4
        assert 0 <= curves[f"{seen}/entropy"] <= 1
    assert curves["train/router_gradient_norm"] > 0
    by_layer = run.points[-1].expert_shares
    assert [sum(shares) for shares in by_layer] == [pytest.approx(1)] * 2
    assert max(by_layer[1]) == curves["train/experts_of_layer_01/largest_share"]


def test_the_balance_loss_spreads_them(start: Callable) -> None:
    entropies = []
    for balance in (0.0, 0.5):
        run = start(f"balance-{balance}", balance_loss=balance, steps=60, log_every=20)
        run.trainer.fit()
        entropies.append(run.points[-1].further["experts_of_layer_01/entropy"])
    assert entropies[1] > entropies[0]
    assert entropies[1] > 0.97


def test_biases_spread_them_without_a_loss(
    start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "SHAPE", replace(conftest.SHAPE, **DEEPSEEK))
    entropies = []
    for rate in (0.0, 0.02):
        settings = {"balance_loss": 0.0, "z_loss": 0.0, "balance_rate": rate}
        run = start(f"rate-{rate}", steps=60, log_every=20, **settings)
        run.trainer.fit()
        assert len(run.points[-1].expert_shares) == 1  # the first layer is no mixture
        entropies.append(run.points[-1].further["experts_of_layer_01/entropy"])
    assert entropies[1] > entropies[0]
    assert entropies[1] > 0.97
    (bias,) = run.model.balance_biases.values()
    assert bias.any()
    # Each is a sum of steps by the rate; a step that is left out moves nothing.
    torch.testing.assert_close(bias / 0.02, (bias / 0.02).round(), atol=1e-3, rtol=0)
    before = bias.clone()
    run.model.routers["1"].routes_E[0] = 5
    run.trainer.routing.move_biases(torch.tensor(1.0))
    assert torch.equal(bias, before)
    run.model.routers["1"].routes_E[0] = 5
    run.trainer.routing.move_biases(torch.tensor(0.0))
    expected = before + torch.tensor([-0.02, 0.02, 0.02, 0.02])
    torch.testing.assert_close(bias, expected)


def test_a_collapsed_layer_sends_the_run_back_and_then_ends_it(
    start: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(steps=400, log_every=10, checkpoint_every=40, max_rollbacks=2)
    run.trainer.events = noted = Noted()
    favour(run)
    expected = (
        r"layer 1 sent most of its tokens to one of its 4 experts for 50 steps, at step \d+ after "
        r"going back to a checkpoint 2 times; raise train.balance_loss\(0.01\)"
    )
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match=expected):
        run.trainer.fit()
    assert "for 50 steps: went back to step 40, and goes on with other data" in caplog.text
    assert noted.kinds.count("rollback") == 2


def stop_at(run: Any, step: int) -> None:
    """Let the run die as it reports this step."""

    def report(point: Any) -> None:
        if point.step == step:
            raise KeyboardInterrupt

    run.trainer.report = report
    with pytest.raises(KeyboardInterrupt):
        run.trainer.fit()


def test_a_run_that_goes_on_counts_on(start: Callable) -> None:
    settings = {"steps": 100, "log_every": 10, "checkpoint_every": 20, "max_rollbacks": 0}
    first = start(**settings)
    favour(first)
    stop_at(first, 30)
    again = start(**settings)
    favour(again)
    with pytest.raises(UserError, match=r"for 50 steps, at step 50; raise"):
        again.trainer.fit()
    assert again.points[0].step == 30


@pytest.mark.parametrize("further", [{}, DEEPSEEK], ids=["softmax", "sigmoid"])
def test_a_killed_run_ends_in_the_same_bits(
    further: dict[str, Any], start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "SHAPE", replace(conftest.SHAPE, **further))
    whole = start("whole")
    whole.trainer.fit()
    stop_at(start("parts"), 6)
    rest = start("parts")
    rest.trainer.fit()
    assert rest.points[0].step == 5
    ends = rest.model.state_dict()
    assert any(name.endswith("correction_bias") for name in ends) == bool(further)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, ends[name])
