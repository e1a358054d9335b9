"""A model folder's tokenizer as evaluation needs it: it says what ids leave out of a text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.data.token_shards import Ids
from pipelines.data.tokenizer import Encoder


@dataclass(frozen=True)
class EncodedText:
    """One text as token ids, with no end-of-document token."""

    ids: Ids
    spelling_nats: float  # for the bytes that unknown tokens stand for


class TextCodec(Encoder):
    """An encoder that charges for unknown tokens.

    A token for "some character unknown" makes a text cheap by losing it. So the bytes it stands
    for count as spelled out behind it, each of the 256 equally likely.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._unknown = None if unknown is None else self._tokenizer.token_to_id(unknown)

    def encode_texts(self, texts: Sequence[str]) -> list[EncodedText]:
        """Each text as it stands in the token shards, less the end-of-document token."""
        documents = [ids[:-1] for ids in self.encode(texts)]
        return [
            EncodedText(ids, self._spelling_nats(text, ids))
            for text, ids in zip(texts, documents, strict=True)
        ]

    def _spelling_nats(self, text: str, ids: Ids) -> float:
        known = ids[ids != self._unknown] if self._unknown is not None else ids
        if len(known) == len(ids):
            return 0.0
        lost = len(text.encode()) - len(self.decode(known.tolist()).encode())
        return lost * math.log(256)
