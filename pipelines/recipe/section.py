"""What every part of a recipe is made of."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]

# A user name and password; over HTTP a lone name is mostly an access token.
_SECRET = re.compile(r"://[^/:\s]*:[^/\s]*@|https?://[^/\s]+@")


class Section(BaseModel):
    """A frozen part of a recipe that refuses keys it does not know."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # from tracebacks: it may be a URL with a password
    )


def form_field(default: Any, description: str, **constraints: Any) -> Any:
    """A leaf that the Airflow trigger form shows."""
    return Field(
        default, description=description, json_schema_extra={"trigger_form": True}, **constraints
    )


def refuse_secret(url: str, key: str) -> None:
    """Raise ValueError for a URL with a password: recipes are logged, tracked and published."""
    if _SECRET.search(url):
        raise ValueError(
            f"the URL in {key} holds a password or token, which every record of a run would show; "
            "leave it out and give it by the store's own variables or files"
        )
