"""AdamW with paged moments: torch's AdamW to the bit, however its pages divide the weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipelines.core.errors import UserError
from pipelines.models.presets import preset
from pipelines.parallel.division import check_division
from pipelines.parallel.layout import Layout
from pipelines.recipe.recipe import Recipe
from pipelines.training import paged_moments
from pipelines.training.guard import step_unless
from pipelines.training.paged_moments import PagedAdamW
from tests.settled import FP32
from tests.unit.training.conftest import Run

RATES: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95)}
SHAPES = [(24, 128), (7, 5), (0, 64), (300,), (1,), (64, 64)]
CPU = torch.device("cpu")


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [each for each in parameters if each.ndim == 2], "weight_decay": 0.3},
        {"params": [each for each in parameters if each.ndim == 1], "weight_decay": 0.0},
    ]


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Six steps at falling rates, the fourth of which is left out."""
    torch.manual_seed(1)
    for step in range(6):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = RATES["lr"] / (step + 1)
        step_unless(torch.tensor(float(step == 3)), optimizer)


@pytest.fixture(params=[64, 192, 1024, 1 << 23], ids="pages of {}".format)
def page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(paged_moments, "PAGE", request.param)
    return int(request.param)


def test_it_is_adamw_to_the_bit(page: int) -> None:
    del page
    expected, found = weights(), weights()
    plain = torch.optim.AdamW(groups(expected), **RATES, fused=True)
    paged = PagedAdamW(groups(found), **RATES, device=CPU)
    steps(plain, expected)
    steps(paged, found)
    for theirs, ours in zip(expected, found, strict=True):
        assert torch.equal(theirs, ours)
        moments = plain.state[theirs], paged.state[ours]
        assert list(moments[0]) == list(moments[1])
        for name, moment in moments[0].items():
            assert torch.equal(moment, moments[1][name]), name


def test_a_page_takes_a_slot_when_the_one_before_in_it_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the events that a device would wait for."""
    seen: list[tuple[str, object]] = []

    def copied(lane: object, _: object, after: object) -> str:
        kind = "arrived" if lane is paged._arriving else "left"
        name = f"{kind} {sum(each[0].startswith(kind) for each in seen)}"
        seen.append((name, after))
        return name

    def now(_: object) -> str:
        return f"after {seen[-1][0]}" if seen else "begun"

    monkeypatch.setattr(paged_moments, "PAGE", 1024)
    monkeypatch.setattr(paged_moments._Lane, "copy", copied)
    monkeypatch.setattr(paged_moments, "_now", now)
    monkeypatch.setattr(paged_moments, "_wait", lambda event: seen.append(("waits for", event)))
    parameters = weights()
    paged = PagedAdamW(groups(parameters), **RATES, device=CPU)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    paged.step()
    number = len(paged._pages)
    assert number > 2 * paged_moments.PAGES
    free = {name: after for name, after in seen if name.startswith("arrived")}
    assert [free[f"arrived {page}"] for page in range(number)] == [
        *["begun"] * paged_moments.PAGES,
        *(f"left {page}" for page in range(number - paged_moments.PAGES)),
    ]
    waits = [event for name, event in seen if name == "waits for"]
    assert waits == [*(f"arrived {page}" for page in range(number)), f"left {number - 1}"]
    for page in range(number):  # it leaves when it was updated, which is after it arrived
        at = seen.index((f"left {page}", "after waits for"))
        assert seen[at - 1] == ("waits for", f"arrived {page}")


def test_no_more_than_three_pages_are_on_the_device(
    page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tensor] = []
    slots = PagedAdamW._slots

    def noted(optimizer: PagedAdamW) -> list[Tensor]:
        made[:] = slots(optimizer)
        return made

    monkeypatch.setattr(PagedAdamW, "_slots", noted)
    parameters = weights()
    steps(PagedAdamW(groups(parameters), **RATES, device=CPU), parameters)
    padded = sum(-(-each.numel() // 64) * 64 for each in parameters)
    assert sum(each.numel() for each in made) <= 2 * min(3 * page, padded)


def test_a_weight_without_a_gradient_stays() -> None:
    parameters = weights()
    before = parameters[0].detach().clone()
    paged = PagedAdamW(groups(parameters), **RATES, device=CPU)
    for parameter in parameters[1:]:
        parameter.grad = torch.ones_like(parameter)
    paged.step()
    assert torch.equal(parameters[0], before)
    assert paged.state[parameters[0]]["step"] == 0
    assert paged.state[parameters[1]]["step"] == 1


def test_a_run_goes_on_with_and_without_it(start: Callable[..., Run]) -> None:
    whole = start("whole").trainer
    whole.fit()
    begun = start("parts", steps=10)
    begun.trainer.schedule.last_step = 4
    begun.trainer.fit()
    paged = start("parts", parallel={"paged_moments": True})
    assert isinstance(paged.trainer.optimizer, PagedAdamW)
    paged.trainer.schedule.last_step = 8
    paged.trainer.fit()
    assert paged.points[0].step == 5  # it went on there
    last = start("parts").trainer
    last.fit()
    for expected, found in zip(whole.parameters, last.parameters, strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"train": {"optimizer": "muon"}}, r"not with train\.optimizer = muon; set adamw"),
        ({"train": {"optimizer": "adamw_8bit"}}, r"not with train\.optimizer = adamw_8bit"),
        ({"parallel": {"cpu_offload": True, "sharding": "full"}}, r"already"),
    ],
)
def test_what_it_is_refused_with(values: dict[str, Any], line: str) -> None:
    parallel = {"paged_moments": True} | values.get("parallel", {})
    train = FP32 | values.get("train", {})
    recipe = Recipe.model_validate({"name": "t", "parallel": parallel, "train": train})
    with pytest.raises(UserError, match=rf"parallel\.paged_moments: .*{line}"):
        check_division(preset("llama-1b"), Layout(dp_shard=2), recipe)
