"""What answers are worth, and when training pleases its rewards only."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.core.errors import UserError
from pipelines.recipe.recipe_files import load_recipe
from pipelines.recipe.reinforcement_section import Reinforcement
from pipelines.reinforcement.alarms import Alarms
from pipelines.reinforcement.rewards import rewards_of

TESTS = "assert add(1, 2) == 3\nassert add(0, 0) == 0"


def reward(name: str, **settings: Any) -> Any:
    by = Reinforcement(kind="grpo", rewards=[{"name": name, "settings": settings}])
    return rewards_of(by)[name]


@pytest.mark.parametrize(
    ("answer", "wanted", "settings", "worth"),
    [
        ("7", "7", {}, 1.0),
        (" 7.0", "7", {}, 1.0),
        ("8", "7", {}, 0.0),
        ("", "7", {}, 0.0),
        ("so\n#### 1,000", "#### 1000", {"pattern": r"####\s*(\S+)"}, 1.0),
        ("so 1000", "#### 1000", {"pattern": r"####\s*(\S+)"}, 0.0),
    ],
)
def test_exact_match(answer: str, wanted: str, settings: dict, worth: float) -> None:
    assert reward("exact_match", **settings)("q", answer, wanted) == worth


@pytest.mark.parametrize(
    ("answer", "worth"),
    [
        ("def add(a, b):\n    return a + b", 1.0),
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", 1.0),
        ("def add(a, b):\n    return a - b", 0.0),
        ("import os\nos._exit(0)", 0.0),
    ],
)
def test_python_tests(answer: str, worth: float) -> None:
    assert reward("python_tests")("q", answer, TESTS) == worth


def test_mathematics_without_its_package_says_so_at_once() -> None:
    try:
        import math_verify  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match="math-verify, which is not installed"):
            reward("math")
    else:
        assert reward("math")("q", r"$\frac{2}{4}$", "$0.5$") == 1.0
        assert reward("math")("q", "$3$", "$0.5$") == 0.0


def test_a_setting_that_a_reward_does_not_know_is_refused() -> None:
    with pytest.raises(UserError, match=r"exact_match refuses: .*unexpected .*'patern'"):
        reward("exact_match", patern="x")


def test_a_recipe_must_reward_something() -> None:
    chat = ["data.instruction.kind=prompt_response", "reinforcement.kind=grpo"]
    for overrides, told in (
        ([], "rewards names none with a weight"),
        (["reinforcement.rewards=[{name: math, weight: 0}]"], "rewards names none with a weight"),
        (["reinforcement.rewards=[{name: math}]", "train.global_batch_size=12"], "groups of"),
        (["reinforcement.rewards=[{name: math}]", "reinforcement.max_tokens=999"], "lower it"),
    ):
        with pytest.raises(UserError, match=told):
            load_recipe("debug", [*chat, *overrides])


def point(step: int, **figures: float) -> SimpleNamespace:
    usual = {"reward": 0.2, "reward_exact_match": 0.2, "answer_tokens": 10.0, "drift": 0.1}
    return SimpleNamespace(step=step, further=usual | {"sampler_mismatch": 0.0} | figures)


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        ({"drift": 1.1}, "step 9: the model is 1.1 nats a token from the one that training"),
        ({"answer_tokens": 31.0}, "step 9: answers have 31 tokens, and had 10 at first"),
        ({"sampler_mismatch": 0.3}, "step 9: trainer and sampler disagree by 0.3 nats a token"),
        (
            {"reward": 0.9, "reward_exact_match": 0.05},
            "step 9: the reward rose from 0.2 to 0.9, but the watched exact_match fell from 0.2 to "
            "0.05",
        ),
        ({"reward": 0.9, "reward_exact_match": 0.4}, None),
    ],
)
def test_an_alarm_is_raised_once_and_kept_in_checkpoints(figures: dict, told: str | None) -> None:
    rewards = [{"name": "own"}, {"name": "exact_match", "weight": 0}]
    by = Reinforcement(kind="grpo", rewards=rewards)
    alarms, noted = Alarms(by), []
    alarms.events = SimpleNamespace(note=lambda *args, **_: noted.append(args))
    alarms.look(point(1))
    assert not alarms.raised
    alarms.look(point(9, **figures))
    later = Alarms(by)
    later.load_state_dict(alarms.state_dict())
    later.look(point(19, **figures))
    assert alarms.raised == later.raised
    assert [each.partition(" from the one")[0] for each in alarms.raised] == (
        [told.partition(" from the one")[0]] if told else []
    )
    assert len(noted) == len(alarms.raised)
