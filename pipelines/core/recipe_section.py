"""What every part of a recipe is made of."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A frozen part of a recipe that refuses keys it does not know."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )


def form_field(default: Any, description: str, **constraints: Any) -> Any:
    """A leaf that the Airflow trigger form shows."""
    return Field(
        default, description=description, json_schema_extra={"trigger_form": True}, **constraints
    )
