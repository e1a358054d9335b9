"""The part of a recipe that says how a model learns from rewards for its own answers."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from pipelines.recipe.section import Extension, Section, repeated

BUILT_IN_REWARDS = "exact_match", "math", "python_tests"


class Reward(Extension):
    """What an answer is worth: `exact_match`, `math`, `python_tests`, or one of your own package's
    entry points.
    """

    weight: float = Field(
        1.0, ge=0, description="In the sum that a model learns from; 0: it is only watched"
    )


class Reinforcement(Section):
    """Learning from rewards: the model answers each prompt several times and learns to answer as in
    the better ones.
    """

    kind: Literal["none", "grpo"] = Field(
        "none", description="grpo: an answer is compared with the others to its prompt"
    )
    answers: int = Field(8, ge=2, description="To each prompt")
    max_tokens: int = Field(64, ge=1, description="Most tokens in an answer")
    rewards: tuple[Reward, ...] = Field(
        (), description="Their weighted sum is what an answer is worth"
    )
    advantage: Literal["normalised", "centred"] = Field(
        "normalised",
        description="An answer's reward less the mean of its prompt's; normalised: divided by "
        "their standard deviation, centred: not (Dr. GRPO)",
    )
    mean_over: Literal["answers", "tokens", "limit"] = Field(
        "answers",
        description="answers: each weighs the same; tokens: each token does (DAPO); limit: a token "
        "weighs one of max_tokens (Dr. GRPO)",
    )
    clip: tuple[float, float] = Field(
        (0.2, 0.2),
        description="How far a token may become less and more likely than it was when it was "
        "sampled, before it teaches nothing more; 0.2 and 0.28 in DAPO",
    )
    draws: int = Field(
        1,
        ge=1,
        le=16,
        description="How many times as many prompts a step may try, to replace those whose answers "
        "are all worth the same (DAPO)",
    )
    kl: float = Field(
        0.0, ge=0, description="Weight of the divergence from the model that training starts from"
    )
    ahead: bool = Field(
        False,
        description="Sample the next step's answers while this one trains, from weights that are "
        "one step old",
    )
    samplers: int = Field(
        0, ge=0, description="Ray actors that sample, a GPU each; 0: the first worker samples"
    )
    max_drift: float = Field(
        1.0, gt=0, description="Alarm: nats a token by which the model has moved from the first"
    )
    max_growth: float = Field(
        3.0, gt=1, description="Alarm: how many times as long its answers are as at first"
    )
    max_watched_loss: float = Field(
        0.1, ge=0, description="Alarm: by how much a watched reward falls while the others rise"
    )
    max_mismatch: float = Field(
        0.2,
        gt=0,
        description="Alarm: nats a token by which trainer and sampler disagree about an answer",
    )

    @property
    def is_on(self) -> bool:
        """Whether a model learns so."""
        return self.kind != "none"

    @property
    def of_packages(self) -> list[Reward]:
        """The rewards that are not built in."""
        return [each for each in self.rewards if each.name not in BUILT_IN_REWARDS]

    @field_validator("clip")
    @classmethod
    def _is_a_range(cls, clip: tuple[float, float]) -> tuple[float, float]:
        if not (0 < clip[0] < 1 and clip[1] > 0):
            raise ValueError("the first must be above 0 and below 1, the second above 0")
        return clip

    @model_validator(mode="after")
    def _rewards_something(self) -> Self:
        if self.is_on and not any(each.weight for each in self.rewards):
            raise ValueError(
                "rewards names none with a weight, so that nothing could be learnt; name one of "
                f"{', '.join(BUILT_IN_REWARDS)} or of your own package"
            )
        if twice := repeated([each.name for each in self.rewards]):
            raise ValueError(f"rewards names {', '.join(twice)} twice")
        return self
