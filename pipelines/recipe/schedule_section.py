"""The section `schedule` of a recipe: when its DAG runs, and for whom."""

from typing import Annotated

from pydantic import Field, field_validator

from pipelines.core.cron import checked_cron
from pipelines.recipe.data_section import DATASET_NAME
from pipelines.recipe.section import MODEL_NAME, Section

# The DAGs that run any recipe, and what ends the name of one that looks for a recipe's new data.
MAIN_DAG, REFRESH_DAG, SWEEP_DAG = "llm_pipeline", "data_refresh", "llm_sweep"
COLLECTION_DAG = "collect_garbage"  # it deletes what old runs left
REFRESH = ".refresh"
_Tag = Annotated[str, Field(max_length=100)]  # Airflow takes no longer one
_CHAMPION = rf"^{MODEL_NAME}@champion$"


class Schedule(Section):
    """When the recipe's own DAG runs, and for whom; without any time it runs by hand only."""

    cron: str | None = Field(None, description="Start at these times: `0 0 * * 0`; null: never")
    timezone: str = Field("UTC", description="Time zone of cron and refresh: Europe/Berlin")
    dataset: str | None = Field(
        None,
        pattern=f"^{DATASET_NAME}$",
        description="Start for each new version of this dataset, and train on it; null: never",
    )
    model: str | None = Field(
        None,
        pattern=_CHAMPION,
        description="Start when another version becomes this champion, NAME@champion; null: never",
    )
    refresh: str | None = Field(
        None,
        description="Look for new data at these times, as in cron, and publish them as a dataset "
        "version; null: never",
    )
    paused: bool = Field(
        False, description="Let the DAG begin paused, until somebody switches it on in Airflow"
    )
    owner: str = Field("penstock", min_length=1, description="Whom Airflow shows as its owner")
    tags: tuple[_Tag, ...] = Field((), description="Tags in Airflow besides `penstock`")
    priority: int = Field(
        1, ge=1, le=100, description="Who waits for a slot: more goes before less"
    )
    alerts: tuple[str, ...] = Field(
        (), description="Addresses that the notice of a failed or late run names"
    )
    deadline_hours: float | None = Field(
        None,
        gt=0,
        le=8760,
        description="Report a run that is not over by then; null: the platform's",
    )

    @field_validator("cron", "refresh")
    @classmethod
    def _is_cron(cls, text: str | None) -> str | None:
        return None if text is None else checked_cron(text)

    @field_validator("timezone")
    @classmethod
    def _is_a_time_zone(cls, name: str) -> str:
        from zoneinfo import ZoneInfo

        try:
            ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            raise ValueError("not the name of a time zone such as UTC or Europe/Berlin") from None
        return name
