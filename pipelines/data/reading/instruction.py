"""Turns records into documents: texts, or conversations with their turns.

A record is the content of a JSONL line, a Parquet row or a dataset's row. A record that does not
match the recipe is dropped as malformed; the reason says what is wrong and, if that is known, which
setting would read it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pipelines.core.errors import UserError
from pipelines.data.normalize import MALFORMED, Document, Messages, conversation, document, drop
from pipelines.recipe.data_section import Data, Instruction

SYSTEM, USER, ASSISTANT = ROLES = ("system", "user", "assistant")
_MOST_SHOWN = 8  # most field names in a message


class _MalformedError(ValueError):
    """The reason why a record cannot become a document."""


@dataclass(frozen=True)
class Fields:
    """The names of a record's fields that hold its text or its turns."""

    text: str = "text"
    instruction: Instruction = field(default_factory=Instruction)

    @classmethod
    def of(cls, data: Data) -> "Fields":
        """Return the fields that a recipe names."""
        return cls(data.source.text_field, data.instruction)

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read; all others are ignored."""
        wanted = self.instruction
        return {
            "none": (self.text,),
            "messages": (wanted.messages_field,),
            "prompt_response": (wanted.prompt_field, wanted.response_field),
        }[wanted.kind]

    def other_kind(self, names: Collection[str]) -> str | None:
        """Return the setting that would read records with these fields, or None."""
        asked = self.instruction
        if asked.is_chat:
            return None
        if asked.messages_field in names:
            return "set data.instruction.kind to messages"
        if asked.prompt_field in names and asked.response_field in names:
            return "set data.instruction.kind to prompt_response"
        return None

    def check_columns(self, where: str, names: Collection[str]) -> None:
        """Raise UserError if a table lacks a column that has to be read."""
        for column in self.columns:
            if column not in names:
                setting = (
                    "the fields of data.instruction"
                    if self.instruction.is_chat
                    else "data.source.text_field"
                )
                raise UserError(
                    f"{where}: no column {column!r} among {_shown(names)}; "
                    f"{self.other_kind(names) or f'set {setting}'}"
                )


def record_document(source: str, size: int, record: Mapping[str, Any], fields: Fields) -> Document:
    """Return the document of a record; if it is dropped, `size` counts as its bytes."""
    try:
        if fields.instruction.is_chat:
            return conversation(source, _messages(record, fields))
        return document(source, _string(record, fields.text, fields))
    except _MalformedError as problem:
        return drop(source, size, MALFORMED, str(problem))


def _messages(record: Mapping[str, Any], fields: Fields) -> Messages:
    wanted = fields.instruction
    if wanted.kind == "prompt_response":
        prompt = _string(record, wanted.prompt_field, fields)
        response = _string(record, wanted.response_field, fields)
        if not response.strip():
            raise _MalformedError(f"field {wanted.response_field!r} is empty")
        return (USER, prompt), (ASSISTANT, response)
    value = _field(record, wanted.messages_field, fields)
    if not isinstance(value, list):
        raise _MalformedError(f"field {wanted.messages_field!r} is {_kind(value)}, not a list")
    messages = tuple(_turn(number, turn) for number, turn in enumerate(value, 1))
    _check_order(messages)
    return messages


def _turn(number: int, turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise _MalformedError(f"message {number} is {_kind(turn)}, not an object")
    for key in ("role", "content"):
        if not isinstance(turn.get(key), str):
            found = f"is {_kind(turn[key])}, not a string" if key in turn else "is missing"
            raise _MalformedError(f"message {number}: {key!r} {found}")
    role, content = turn["role"], turn["content"]
    if role not in ROLES:
        raise _MalformedError(f"message {number}: role {role!r} is none of {', '.join(ROLES)}")
    if role == ASSISTANT and not content.strip():
        raise _MalformedError(f"message {number}: the assistant's content is empty")
    return role, content


def _check_order(messages: Messages) -> None:
    roles = [role for role, _ in messages]
    if ASSISTANT not in roles:
        raise _MalformedError("no message has the role 'assistant'")
    if SYSTEM in roles[1:]:
        raise _MalformedError("a message with the role 'system' is not the first")
    if roles[roles[0] == SYSTEM] != USER:
        raise _MalformedError("the first non-system message must have the role 'user'")


def _string(record: Mapping[str, Any], name: str, fields: Fields) -> str:
    value = _field(record, name, fields)
    if not isinstance(value, str):
        raise _MalformedError(f"field {name!r} is {_kind(value)}")
    return value


def _field(record: Mapping[str, Any], name: str, fields: Fields) -> Any:
    try:
        return record[name]
    except KeyError:
        other = fields.other_kind(record)
        advice = f"; {other}" if other else ""
        raise _MalformedError(f"no field {name!r} among {_shown(record)}{advice}") from None


def _shown(names: Collection[str]) -> str:
    return ", ".join(map(repr, islice(names, _MOST_SHOWN))) or "none"


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
