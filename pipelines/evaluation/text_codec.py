"""A model folder's tokenizer for evaluation, which measures the text that token ids leave out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipelines.data.normalize import Messages
from pipelines.data.reading.instruction import USER
from pipelines.data.tokens.chat_encoder import ChatEncoder
from pipelines.data.tokens.token_shards import Ids
from pipelines.data.tokens.tokenizer import Encoder


@dataclass(frozen=True)
class EncodedText:
    """One document as token ids."""

    ids: Ids
    scored: npt.NDArray[np.bool_]  # whether each token is scored
    spelling_nats: float  # the cost of the bytes that unknown tokens stand for


class TextCodec(Encoder):
    """An encoder that adds a cost for unknown tokens.

    An unknown token makes a text cheap to predict because it loses the text. So the bytes that it
    stands for are counted as if they followed it, each of the 256 values equally likely.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def encode_texts(self, texts: Sequence[str]) -> list[EncodedText]:
        """Return each text as in the token shards, without the end-of-document token."""
        documents = [ids[:-1] for ids in self.encode(texts)]
        return [
            EncodedText(ids, np.ones(len(ids), bool), self._spelling_nats(text, ids))
            for text, ids in zip(texts, documents, strict=True)
        ]

    def encode_conversations(
        self, conversations: Sequence[Messages], given: Sequence[int] = ()
    ) -> list[EncodedText]:
        """Return each conversation as in the token shards, with the assistant's turns scored.

        The tokens that end the assistant's turns are scored too, as in training; what is among the
        first turns, of which some may be `given`, is not.
        """
        return [
            EncodedText(ids, mask == 1, self._spelling_nats(said, ids[mask == 1]))
            for ids, mask, said in self._chats.encode(conversations, given)
        ]

    def encode_question(self, text: str) -> Ids:
        """Return the prompt that a model reads before it answers a user's message."""
        return self._chats.encode_prompt(((USER, text),))

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of tokens that are never made from a text."""
        return self._chats.special_ids

    @cached_property
    def _chats(self) -> ChatEncoder:
        return ChatEncoder(self._folder)

    def _spelling_nats(self, text: str, ids: Ids) -> float:
        known = ids[ids != self.unknown_id] if self.unknown_id is not None else ids
        if len(known) == len(ids):
            return 0.0
        lost = len(text.encode()) - len(self.decode(known.tolist()).encode())
        # A decoder may add spaces between tokens, so the difference can be negative.
        return max(0, lost) * math.log(256)
