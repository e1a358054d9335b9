"""Turns records into documents: texts, or conversations with their turns.

A record is the content of a JSONL line, a Parquet row or a dataset's row. A record that does not
match the recipe is dropped as malformed; the reason says what is wrong and, if that is known, which
setting would read it.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any

from pipelines.core.errors import UserError
from pipelines.data.normalize import (
    MALFORMED,
    Document,
    Messages,
    conversation,
    document,
    drop,
    single_answer,
)
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
            "preference": (wanted.chosen_field, wanted.rejected_field, wanted.prompt_field),
            "rated": (wanted.prompt_field, wanted.answers_field),
            "labelled": (wanted.prompt_field, wanted.response_field, wanted.label_field),
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
        if asked.chosen_field in names and asked.rejected_field in names:
            return "set data.instruction.kind to preference"
        return None

    def find_columns(self, where: str, names: Collection[str]) -> list[str]:
        """Return the columns of a table to read; raise UserError if it lacks one that must be."""
        is_pair = self.instruction.kind == "preference"  # both conversations may begin with it
        optional = self.instruction.prompt_field if is_pair else None
        for column in self.columns:
            if column not in names and column != optional:
                setting = (
                    "the fields of data.instruction"
                    if self.instruction.is_chat
                    else "data.source.text_field"
                )
                raise UserError(
                    f"{where}: no column {column!r} among {_shown(names)}; "
                    f"{self.other_kind(names) or f'set {setting}'}"
                )
        return [column for column in self.columns if column in names]


def record_document(source: str, size: int, record: Mapping[str, Any], fields: Fields) -> Document:
    """Return the document of a record; if it is dropped, `size` counts as its bytes."""
    try:
        if fields.instruction.is_preference:
            return conversation(source, *_pair(record, fields))
        if fields.instruction.is_chat:
            return conversation(source, _messages(record, fields))
        return document(source, _string(record, fields.text, fields))
    except _MalformedError as problem:
        return drop(source, size, MALFORMED, str(problem))


def _messages(record: Mapping[str, Any], fields: Fields) -> Messages:
    wanted = fields.instruction
    if wanted.kind == "prompt_response":
        prompt = _string(record, wanted.prompt_field, fields)
        return (USER, prompt), (ASSISTANT, _answer(record, wanted.response_field, fields))
    messages = _turns(record, wanted.messages_field, fields)
    _check_order(messages)
    return messages


def _pair(record: Mapping[str, Any], fields: Fields) -> tuple[Messages, Messages]:
    """Return the chosen and the rejected conversation, by the form of the fields."""
    wanted = fields.instruction
    if wanted.kind == "labelled":
        return _labelled(record, fields)
    names = wanted.chosen_field, wanted.rejected_field
    if wanted.kind == "rated":
        record = {**record, **dict(zip(names, _best_and_worst(record, fields), strict=True))}
    found, prompt = _field(record, names[0], fields), record.get(wanted.prompt_field)
    if isinstance(found, list) or isinstance(prompt, list):
        # A text beside whole conversations only repeats their beginning.
        turns = isinstance(prompt, list)
        before = _turns(record, wanted.prompt_field, fields) if turns else ()
        chosen, rejected = (before + _turns(record, name, fields) for name in names)
    else:
        asked = (USER, _string(record, wanted.prompt_field, fields))
        chosen, rejected = ((asked, (ASSISTANT, _answer(record, n, fields))) for n in names)
    for messages in (chosen, rejected):
        _check_order(messages)
    if single_answer(chosen, rejected):
        raise _MalformedError("one of the two answers is missing")
    return chosen, rejected


def _labelled(record: Mapping[str, Any], fields: Fields) -> tuple[Messages, Messages]:
    """Return the conversation on the side that its label says, and its prompt on the other."""
    wanted = fields.instruction
    label, prompt = _field(record, wanted.label_field, fields), record.get(wanted.prompt_field)
    if label not in (True, False):
        raise _MalformedError(f"field {wanted.label_field!r} is {label!r}, not true or false")
    if isinstance(prompt, list):
        before = _turns(record, wanted.prompt_field, fields)
    else:
        before = ((USER, _string(record, wanted.prompt_field, fields)),)
    whole = (*before, (ASSISTANT, _answer(record, wanted.response_field, fields)))
    _check_order(whole)
    return (whole, before) if label else (before, whole)


def _best_and_worst(record: Mapping[str, Any], fields: Fields) -> tuple[str, str]:
    """Return the answers with the highest and the lowest rating; the first of equal ones."""
    name = fields.instruction.answers_field
    answers = _field(record, name, fields)
    if not isinstance(answers, list) or not all(map(_is_rated, answers)):
        raise _MalformedError(f"field {name!r} is not a list of {{content, rating}}")
    if len({each["rating"] for each in answers}) < 2:
        raise _MalformedError(f"field {name!r}: no answer is rated higher than another")
    best, worst = (choose(answers, key=itemgetter("rating")) for choose in (max, min))
    return best["content"], worst["content"]


def _is_rated(answer: Any) -> bool:
    if not isinstance(answer, dict) or not isinstance(answer.get("content"), str):
        return False
    rating = answer.get("rating")
    return isinstance(rating, int | float) and -math.inf < rating < math.inf


def _turns(record: Mapping[str, Any], name: str, fields: Fields) -> Messages:
    value = _field(record, name, fields)
    if not isinstance(value, list):
        raise _MalformedError(f"field {name!r} is {_kind(value)}, not a list")
    return tuple(_turn(number, turn) for number, turn in enumerate(value, 1))


def _answer(record: Mapping[str, Any], name: str, fields: Fields) -> str:
    answer = _string(record, name, fields)
    if not answer.strip():
        raise _MalformedError(f"field {name!r} is empty")
    return answer


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
