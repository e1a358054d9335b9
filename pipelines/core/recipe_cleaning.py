"""The part of a recipe that says which documents are fit to train on, and what is masked in them."""

from typing import Literal

from pydantic import Field

from pipelines.core.recipe_section import Section


class Filters(Section):
    """Which documents are dropped for what they are; every filter is off by default."""


class Pii(Section):
    """What is done about personal data and secrets."""

    action: Literal["off", "report", "mask", "drop"] = Field(
        "off", description="Personal data and secrets: report counts them, mask replaces them"
    )


class Decontamination(Section):
    """Evaluation sets whose text must not be trained on."""

    against: tuple[str, ...] = Field(
        (), description="Files, folders, globs or URLs of evaluation text; empty: none"
    )
    ngram: int = Field(13, ge=5, description="Words a document may not share in a row")


class Dedup(Section):
    """Which documents count as the same; the first in source order stays."""

    kind: Literal["exact", "minhash"] = Field(
        "exact", description="exact: the same text; minhash: also nearly the same"
    )
    ngram: int = Field(5, ge=1, description="Words a shingle")
    permutations: int = Field(128, ge=16, le=1024, description="Values a MinHash signature")
    jaccard: float = Field(0.8, gt=0, lt=1, description="Similarity from which two are the same")
