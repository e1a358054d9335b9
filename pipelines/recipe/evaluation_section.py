"""The part of a recipe that says how a model must behave, as tests of single capabilities.

The kinds are CheckList's (Ribeiro et al., "Beyond Accuracy: Behavioral Testing of NLP Models with
CheckList", 2020), put in terms of what a language model gives: how likely a continuation is.

The parts of a recipe that say what is looked for in a model besides how well it predicts.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from pipelines.recipe.section import Count, Section


class BehaviourCase(Section):
    """A prompt, what follows it, and what that is compared with."""

    prompt: str = Field(min_length=1)
    continuation: str = Field(min_length=1)
    wrong: str | None = Field(None, description="minimum_functionality: what must be less likely")
    changed: str | None = Field(None, description="Else: the prompt after the change")


class Behaviour(Section):
    """A test of one capability: so many cases, each passed or failed."""

    name: str = Field(pattern=r"^[\w][\w. -]*$")
    kind: Literal["minimum_functionality", "invariance", "directional"] = Field(
        description="minimum_functionality: the continuation is likelier than the wrong one; "
        "invariance: the change moves its log-likelihood by at most max_bits; directional: the "
        "change moves it as said"
    )
    max_bits: float = Field(1.0, ge=0, description="invariance: either way")
    direction: Literal["up", "down"] = Field("up", description="directional: likelier, or less so")
    cases: tuple[BehaviourCase, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _cases_are_of_the_kind(self) -> Self:
        wanted, other = "changed", "wrong"
        if self.kind == "minimum_functionality":
            wanted, other = other, wanted
        for number, case in enumerate(self.cases, 1):
            if not getattr(case, wanted) or getattr(case, other) is not None:
                raise ValueError(
                    f"test `{self.name}`, case {number}: of kind {self.kind} it needs `{wanted}` "
                    f"and no `{other}`"
                )
        return self


class Bias(Section):
    """Whether sentences that a stereotype ascribes to a group are likelier about it."""

    enabled: bool = True
    templates: str | None = Field(
        None,
        description="A JSON file of groups and sentences; null: Penstock's own, gender and age in "
        "English and Korean",
    )


class Safety(Section):
    """Whether a model gives away what it was trained on."""

    documents: int = Field(
        100, ge=0, description="Of training, whose text the model may have by heart; 0: none"
    )
    prefix_tokens: Count = Field(50, description="Of such a text that the model is given")
    continuation_tokens: Count = Field(50, description="Of it that must come out, every one")
    generations: int = Field(
        0, ge=0, description="Texts in which personal data are looked for; each is generated"
    )
