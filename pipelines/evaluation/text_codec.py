"""A model folder's tokenizer as evaluation needs it: it says what ids leave out of a text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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

    def encode_texts(self, texts: Sequence[str]) -> list[EncodedText]:
        """Each text as it stands in the token shards, less the end-of-document token."""
        documents = [ids[:-1] for ids in self.encode(texts)]
        return [
            EncodedText(ids, self._spelling_nats(text, ids))
            for text, ids in zip(texts, documents, strict=True)
        ]

    def _spelling_nats(self, text: str, ids: Ids) -> float:
        known = ids[ids != self.unknown_id] if self.unknown_id is not None else ids
        if len(known) == len(ids):
            return 0.0
        lost = len(text.encode()) - len(self.decode(known.tolist()).encode())
        # Spaces that a decoder puts between tokens must not pay for what is lost.
        return max(0, lost) * math.log(256)
