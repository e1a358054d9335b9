"""The base of every part of a recipe."""

import re
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
MODEL_NAME = r"\.?[\w-][\w. -]*"  # a name in the registry and of a folder
REGISTERED = "models:/"  # what the reference of a registered model begins with

# A user name and password; over HTTP a user name alone is mostly an access token.
_SECRET = re.compile(r"://[^/:\s]*:[^/\s]*@|https?://[^/\s]+@")


class Section(BaseModel):
    """A frozen part of a recipe that refuses unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # the input in a traceback may be a URL with a password
    )


class Extension(Section):
    """An extension of a team's own package, by the name of its entry point: docs/extensions.md."""

    name: str = Field(pattern=r"^[\w][\w.-]*$", description="The name of its entry point")
    settings: dict[str, Any] = Field({}, description="The arguments that it is called with")

    @model_validator(mode="after")
    def _settings_hold_no_secret(self) -> Self:
        for key, value in self.settings.items():
            refuse_secret(str(value), f"the setting {key} of {self.name}")
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # a mapping has no hash


def check_extension(kind: str, extension: Extension | None, key: str) -> None:
    """Raise ValueError unless an extension is named just where the kind is `extension`."""
    if kind == "extension" and extension is None:
        raise ValueError(f"kind `extension` needs {key}.extension: its name")
    if kind != "extension" and extension is not None:
        raise ValueError(
            f"{key}.extension names {extension.name}, but kind is `{kind}`; set kind to extension"
        )


def form_field(default: Any, description: str, **constraints: Any) -> Any:
    """Return a leaf that the Airflow trigger form shows."""
    return Field(
        default, description=description, json_schema_extra={"trigger_form": True}, **constraints
    )


def repeated(names: list[str]) -> list[str]:
    """Return the names that are there more than once, in order of the alphabet."""
    return sorted({name for name in names if names.count(name) > 1})


def refuse_secret(url: str, key: str) -> None:
    """Raise ValueError for a URL with a password: recipes are logged, tracked and published."""
    if _SECRET.search(url):
        raise ValueError(
            f"the URL in {key} holds a password or token, which every record of a run would show; "
            "leave it out and give it in the store's own variables or files"
        )


def check_reference(reference: str | None) -> str | None:
    """Return a folder's path, or a registered model as `models:/NAME@N` or `models:/NAME@alias`.

    Raises:
        ValueError: it begins as a registered model, but names no version.
    """
    if reference and reference.startswith(REGISTERED):
        name, _, which = reference.removeprefix(REGISTERED).rpartition("@")
        if not (which and re.fullmatch(MODEL_NAME, name)):
            raise ValueError(
                f"{reference} names no version of a registered model; "
                "give models:/NAME@champion or models:/NAME@7"
            )
    return reference


def registered_label(reference: str | None) -> str | None:
    """Return `NAME@N` or `NAME@alias` of a registered model, or None for a folder."""
    is_registered = reference is not None and reference.startswith(REGISTERED)
    return reference.removeprefix(REGISTERED) if reference and is_registered else None
