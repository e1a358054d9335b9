"""A model folder's tokenizer as evaluation needs it: it says what ids leave out of a text."""

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
    scored: npt.NDArray[np.bool_]  # which of them
    spelling_nats: float  # for the bytes that unknown tokens stand for


class TextCodec(Encoder):
    """An encoder that charges for unknown tokens.

    A token for "some character unknown" makes a text cheap by losing it. So the bytes it stands
    for count as spelled out behind it, each of the 256 equally likely.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def encode_texts(self, texts: Sequence[str]) -> list[EncodedText]:
        """Each text as it stands in the token shards, less the end-of-document token."""
        documents = [ids[:-1] for ids in self.encode(texts)]
        return [
            EncodedText(ids, np.ones(len(ids), bool), self._spelling_nats(text, ids))
            for text, ids in zip(texts, documents, strict=True)
        ]

    def encode_conversations(self, conversations: Sequence[Messages]) -> list[EncodedText]:
        """Each conversation as it stands in the token shards; what the assistant says is scored.

        With the tokens that end its turns, as in training.
        """
        return [
            EncodedText(ids, mask == 1, self._spelling_nats(said, ids[mask == 1]))
            for ids, mask, said in self._chats.encode(conversations)
        ]

    def encode_question(self, text: str) -> Ids:
        """What a model reads before it answers a user who says this."""
        return self._chats.encode_prompt(((USER, text),))

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of tokens that no text makes."""
        return self._chats.special_ids

    @cached_property
    def _chats(self) -> ChatEncoder:
        return ChatEncoder(self._folder)

    def _spelling_nats(self, text: str, ids: Ids) -> float:
        known = ids[ids != self.unknown_id] if self.unknown_id is not None else ids
        if len(known) == len(ids):
            return 0.0
        lost = len(text.encode()) - len(self.decode(known.tolist()).encode())
        # Spaces that a decoder puts between tokens must not pay for what is lost.
        return max(0, lost) * math.log(256)
