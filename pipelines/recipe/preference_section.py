"""The part of a recipe that says how a model learns from chosen and rejected answers."""

from typing import Literal, Self

from pydantic import Field, model_validator

from pipelines.recipe.section import Section

WITH_REFERENCE = ("dpo", "ipo", "kto")


class Preference(Section):
    """Learning from pairs: of two answers to one prompt, one was chosen and one rejected.

    Or from single answers, each of which was found good or bad.
    """

    kind: Literal["none", "dpo", "ipo", "kto", "orpo", "simpo"] = Field(
        "none",
        description="dpo, ipo and kto compare with the model that training starts from; orpo and "
        "simpo need none",
    )
    beta: float = Field(
        0.1,
        gt=0,
        description="dpo, kto, simpo: what a reward is multiplied by (for simpo 2 is usual); ipo: "
        "how near the model stays to the first one; orpo: the weight of the odds ratio",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="dpo, simpo: share of pairs that may be the wrong way round"
    )
    length_normalised: bool = Field(
        False, description="dpo: an answer's reward is divided by its tokens"
    )
    margin: float = Field(
        0.5, ge=0, description="simpo: by how much the chosen answer's reward is to be larger"
    )
    weight_of_rejected: float = Field(
        1.0,
        gt=0,
        description="kto: how much a rejected answer counts beside a chosen one; above 1 where few "
        "are labelled as bad",
    )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the model that training starts from."""
        return self.kind in WITH_REFERENCE

    @property
    def by_token(self) -> bool:
        """Whether a reward is that of a token of the answer, and not of the whole answer."""
        return self.kind not in ("dpo", "kto") or self.length_normalised

    @model_validator(mode="after")
    def _only_what_the_kind_has(self) -> Self:
        for key, kinds in (
            ("label_smoothing", ("dpo", "simpo")),
            ("length_normalised", ("dpo",)),
            ("margin", ("simpo",)),
            ("weight_of_rejected", ("kto",)),
        ):
            changed = getattr(self, key) != type(self).model_fields[key].default
            if changed and self.kind not in kinds:
                raise ValueError(f"{key} is for {' and '.join(kinds)}; kind is {self.kind}")
        return self
