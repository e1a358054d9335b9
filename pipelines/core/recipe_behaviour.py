"""The part of a recipe that says how a model must behave, as tests of single capabilities.

The kinds are CheckList's (Ribeiro et al., "Beyond Accuracy: Behavioral Testing of NLP Models with
CheckList", 2020), put in terms of what a language model gives: how likely a continuation is.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from pipelines.core.recipe_section import Section


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
