"""The parts of a recipe that say what is looked for in a model besides how well it predicts."""

from pydantic import Field

from pipelines.core.recipe_section import Count, Section


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
