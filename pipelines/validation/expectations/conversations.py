"""The expectation that conversations can be trained on."""

import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations.metrics.map_metric_provider import (
    ColumnMapMetricProvider,
    column_condition_partial,
)

from pipelines.core.errors import UserError
from pipelines.data.normalize import Messages, shared_turns
from pipelines.data.reading.instruction import ASSISTANT, SYSTEM, USER
from pipelines.data.tokens.chat_encoder import ChatEncoder
from pipelines.validation.expectations.sentence import ReasonedRows


class Piece(NamedTuple):
    """Some tokens of a conversation as text, and whether a model is trained to say them."""

    text: str
    trained: bool


class ValuesWellFormedConversations(ColumnMapMetricProvider):
    """Whether nothing is wrong with a conversation."""

    condition_metric_name = "column_values.well_formed_conversations"
    condition_value_keys = ("tokenizer",)

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(cls, column: Any, tokenizer: str, **_: Any) -> Any:
        return column.map(lambda value: _fault(value, tokenizer) is None)


class ExpectColumnValuesToBeWellFormedConversations(ReasonedRows):
    """Expect conversations that a tokenizer's chat template takes, with something to learn in each.

    After a system's message, if there is one, user and assistant take turns and the assistant
    speaks; the template renders it; and its loss mask is not empty.

        chats = pd.DataFrame({"messages": ['[["user", "2+2?"], ["assistant", "4"]]']})
        batch = whole.get_batch({"dataframe": chats})
        batch.validate(
            ExpectColumnValuesToBeWellFormedConversations(column="messages", tokenizer="my-model")
        )

    Args:
        column: of conversations, as JSON or as they are: lists of (role, content), or of
            {"role": …, "content": …}. Null is no conversation, and passed over.
        tokenizer: a folder that holds a `tokenizer.json` and a chat template.
        mostly: the share of conversations that must be well-formed.
    """

    tokenizer: str

    map_metric = "column_values.well_formed_conversations"
    success_keys = ("tokenizer", "mostly")

    def sentence(self) -> str:
        """Return what is demanded."""
        return (
            "user and assistant must take turns, the chat template must render it, and something "
            f"must be left to predict{self._almost()}"
        )

    def reason(self, value: Any) -> str | None:
        """Return what is wrong with a conversation."""
        return _fault(value, self.tokenizer)

    def pieces(self, value: Any, rejected: Any = None) -> list[Piece]:
        """Return a well-formed conversation as the model sees it, cut where its mask changes.

        Where it is preferred to a rejected one, what both have in common is not trained.
        """
        encoder, messages = _encoder(self.tokenizer), _messages(value)
        given = shared_turns(messages, _messages(rejected)) if isinstance(rejected, str) else 0
        (encoded,) = encoder.encode([messages], [given])
        ends = [*(np.flatnonzero(np.diff(encoded.mask)) + 1), len(encoded.ids)]
        return [
            Piece(encoder.decode(encoded.ids[begin:end]), bool(encoded.mask[begin]))
            for begin, end in pairwise([0, *ends])
        ]


def _messages(value: Any) -> Messages:
    turns = json.loads(value) if isinstance(value, str) else value
    return tuple(
        (turn["role"], turn["content"]) if isinstance(turn, Mapping) else tuple(turn)
        for turn in turns
    )


def _fault(value: Any, tokenizer: str) -> str | None:
    try:
        messages = _messages(value)
        roles = [role for role, _ in messages]
    except (ValueError, KeyError, TypeError) as error:
        return f"is no list of turns ({type(error).__name__}: {error})"
    spoken = roles[1:] if roles[:1] == [SYSTEM] else roles
    for role, expected in zip(spoken, cycle((USER, ASSISTANT)), strict=False):
        if role != expected:
            return f"has the roles {', '.join(map(str, roles))}, which do not take turns"
    if ASSISTANT not in spoken:
        return "has no turn of the assistant"
    try:
        (encoded,) = _encoder(tokenizer).encode([messages])
    except UserError as error:
        return str(error)
    return None if encoded.mask.any() else "leaves nothing to predict"


@lru_cache(maxsize=1)
def _encoder(folder: str) -> ChatEncoder:
    return ChatEncoder(Path(folder))
