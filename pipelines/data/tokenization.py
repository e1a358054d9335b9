"""Documents on disk to token ids: the tasks of the second pass, one row group each."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipelines.data.documents import RowGroup
from pipelines.data.splitting import uniform
from pipelines.data.token_shards import Ids
from pipelines.data.tokenizer import Encoder

_EXCERPT = 12  # characters shown before and after what a tokenizer changes


@dataclass(frozen=True)
class TokenizedDocuments:
    """A row group's documents as ids, one after the other."""

    ids: Ids  # [tokens]
    sizes: npt.NDArray[np.int64]  # [documents], in tokens

    def __iter__(self) -> Iterator[Ids]:
        """The ids of each document."""
        return iter(np.split(self.ids, np.cumsum(self.sizes)[:-1]))


def tokenize(group: RowGroup, tokenizer: Path, tokenizer_md5: str) -> TokenizedDocuments:
    """Tokenise a row group; each document ends with the end-of-document id."""
    texts = group.read("text").column(0).to_pylist()
    documents = _encoder(tokenizer, tokenizer_md5).encode(texts)
    sizes = np.array([len(ids) for ids in documents], dtype=np.int64)
    return TokenizedDocuments(np.concatenate(documents), sizes)


def first_loss(group: RowGroup, tokenizer: Path, tokenizer_md5: str) -> str | None:
    """How the first document of a row group comes back that the tokenizer does not give back."""
    encoder = _encoder(tokenizer, tokenizer_md5)
    for text in group.read("text").column(0).to_pylist():
        given, back = encoder.round_trip(text)
        if given != back:
            pairs = enumerate(zip(given, back, strict=False))
            shorter = min(len(given), len(back))
            same = next((index for index, (a, b) in pairs if a != b), shorter)
            start, stop = max(same - _EXCERPT, 0), same + _EXCERPT
            return f"{given[start:stop]!r} comes back as {back[start:stop]!r}"
    return None


def characters(group: RowGroup) -> frozenset[str]:
    """The distinct characters of a row group."""
    return frozenset().union(*group.read("text").column(0).to_pylist())


def sample_texts(groups: list[RowGroup], fraction: float) -> Iterator[str]:
    """About this fraction of the documents, chosen by content and so alike in every run.

    The first is always among them: of a few very long documents, chance might take none.
    """
    chosen = 0
    for group in groups:
        rows = group.read("doc_id", "text")
        ids, texts = (rows.column(name).to_pylist() for name in ("doc_id", "text"))
        for doc_id, text in zip(ids, texts, strict=True):
            if not chosen or uniform(doc_id, part=1) < fraction:
                chosen += 1
                yield text


@lru_cache(maxsize=1)
def _encoder(folder: Path, tokenizer_md5: str) -> Encoder:  # noqa: ARG001 (keys the cache)
    # A worker keeps the tokenizer between tasks; a large one takes half a second to load.
    return Encoder(folder)
