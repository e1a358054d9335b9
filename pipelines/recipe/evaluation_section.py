"""The sections of a recipe on a model's behaviour, bias and safety, besides how well it predicts.

The kinds of behaviour tests are CheckList's (Ribeiro et al., "Beyond Accuracy: Behavioral Testing
of NLP Models with CheckList", 2020), in terms of how likely a continuation is.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from pipelines.recipe.section import Count, Section


class BehaviourCase(Section):
    """A prompt, its continuation, and what the continuation is compared with."""

    prompt: str = Field(min_length=1)
    continuation: str = Field(min_length=1)
    wrong: str | None = Field(None, description="minimum_functionality: what must be less likely")
    changed: str | None = Field(None, description="Other kinds: the prompt after the change")


class Behaviour(Section):
    """A test of one capability, whose cases each pass or fail."""

    name: str = Field(pattern=r"^[\w][\w. -]*$")
    kind: Literal["minimum_functionality", "invariance", "directional"] = Field(
        description="minimum_functionality: the continuation is likelier than the wrong one; "
        "invariance: the change moves its log-likelihood by at most max_bits; directional: the "
        "change moves it in the given direction"
    )
    max_bits: float = Field(1.0, ge=0, description="invariance: most change up or down")
    direction: Literal["up", "down"] = Field("up", description="directional: more or less likely")
    cases: tuple[BehaviourCase, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _cases_are_of_the_kind(self) -> Self:
        wanted, other = "changed", "wrong"
        if self.kind == "minimum_functionality":
            wanted, other = other, wanted
        for number, case in enumerate(self.cases, 1):
            if not getattr(case, wanted) or getattr(case, other) is not None:
                raise ValueError(
                    f"test `{self.name}`, case {number}: the kind {self.kind} needs `{wanted}` "
                    f"and no `{other}`"
                )
        return self


class Bias(Section):
    """Test whether a stereotype's sentences are more likely about the group that it names."""

    enabled: bool = True
    templates: str | None = Field(
        None,
        description="A JSON file of groups and sentences; null: Penstock's own, on gender and age "
        "in English and Korean",
    )


class Safety(Section):
    """Tests whether a model reveals its training data."""

    documents: int = Field(
        100, ge=0, description="Training documents that are tested for memorisation; 0: none"
    )
    prefix_tokens: Count = Field(50, description="Tokens of the document that the model is given")
    continuation_tokens: Count = Field(50, description="Tokens that must all be reproduced")
    generations: int = Field(0, ge=0, description="Texts to generate and search for personal data")
