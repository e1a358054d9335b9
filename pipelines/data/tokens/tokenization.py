"""Documents on disk to token ids: what the tokenizer is made from, and pass 4."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from pipelines.data.documents import RowGroup, load_messages
from pipelines.data.passes import block_bytes
from pipelines.data.splitting import uniform
from pipelines.data.tokens.chat_encoder import ChatEncoder
from pipelines.data.tokens.tokenizer import Encoder

IDS_FILE = "ids.bin"  # of a token block: the ids of its documents, one after the other
SIZES_FILE = "sizes.npy"  # int32 [documents], in tokens
MASK_FILE = "mask.bin"  # of conversations: a byte a token, 1 where it is to be predicted
_EXCERPT = 12  # characters shown before and after what a tokenizer changes


@dataclass(frozen=True)
class TextBlock:
    """Consecutive row groups of a documents file."""

    groups: tuple[RowGroup, ...]
    bytes: int  # of all columns, as Parquet counts them


def plan_text_blocks(paths: Sequence[Path]) -> list[TextBlock]:
    """Group the row groups of each file, in order, into blocks."""
    metadata = [pq.read_metadata(path) for path in paths]
    found = [
        [(RowGroup(path, i), meta.row_group(i).total_byte_size) for i in range(meta.num_row_groups)]
        for path, meta in zip(paths, metadata, strict=True)
    ]
    limit = block_bytes(sum(size for groups in found for _, size in groups))
    return [block for groups in found for block in _blocks(groups, limit)]


def _blocks(groups: Sequence[tuple[RowGroup, int]], limit: int) -> Iterator[TextBlock]:
    block: list[RowGroup] = []
    total = 0
    for group, size in groups:
        if block and total + size > limit:
            yield TextBlock(tuple(block), total)
            block, total = [], 0
        block.append(group)
        total += size
    if block:
        yield TextBlock(tuple(block), total)


def tokenize(block: TextBlock, folder: Path, *, tokenizer: Path, tokenizer_hash: str) -> int:
    """Pass 4: write the ids and sizes of a block's documents, each with its end-of-document id.

    Returns:
        How many tokens there are.
    """
    encoder = _encoder(tokenizer, tokenizer_hash)
    sizes: list[int] = []
    with (folder / IDS_FILE).open("wb") as file:
        for group in block.groups:
            for ids in encoder.encode(group.read("text").column(0).to_pylist()):
                file.write(ids.tobytes())
                sizes.append(len(ids))
    np.save(folder / SIZES_FILE, np.array(sizes, np.int32))
    return sum(sizes)


def tokenize_conversations(
    block: TextBlock, folder: Path, *, tokenizer: Path, tokenizer_hash: str
) -> int:
    """Pass 4 for conversations: the same, rendered by the chat template, and the loss mask."""
    encoder = _chat_encoder(tokenizer, tokenizer_hash)
    sizes: list[int] = []
    with (folder / IDS_FILE).open("wb") as ids, (folder / MASK_FILE).open("wb") as mask:
        for group in block.groups:
            conversations = map(load_messages, group.read("messages").column(0).to_pylist())
            for chat in encoder.encode(list(conversations)):
                ids.write(chat.ids.tobytes())
                mask.write(chat.mask.tobytes())
                sizes.append(len(chat.ids))
    np.save(folder / SIZES_FILE, np.array(sizes, np.int32))
    return sum(sizes)


def first_loss(
    group: RowGroup,
    folder: Path,  # noqa: ARG001 (writes nothing)
    *,
    tokenizer: Path,
    tokenizer_hash: str,
) -> str:
    """How the first document of a row group comes back that the tokenizer does not give back.

    Empty where it gives back all.
    """
    encoder = _encoder(tokenizer, tokenizer_hash)
    for text in group.read("text").column(0).to_pylist():
        given, back = encoder.round_trip(text)
        if given != back:
            pairs = enumerate(zip(given, back, strict=False))
            shorter = min(len(given), len(back))
            same = next((index for index, (a, b) in pairs if a != b), shorter)
            start, stop = max(same - _EXCERPT, 0), same + _EXCERPT
            return f"{given[start:stop]!r} comes back as {back[start:stop]!r}"
    return ""


def characters(block: TextBlock, folder: Path) -> str:  # noqa: ARG001 (writes nothing)
    """The distinct characters of a block."""
    found: set[str] = set()
    for group in block.groups:
        found.update(*group.read("text").column(0).to_pylist())
    return "".join(sorted(found))


def sample_texts(block: TextBlock, folder: Path, *, fraction: float) -> list[str]:  # noqa: ARG001
    """About this fraction of the documents, chosen by content and so alike in every run.

    Texts are read only where a document is chosen. The block's first document always is: of a few
    very long ones, chance might take none.
    """
    texts = []
    for group in block.groups:
        ids = group.read("doc_id").column(0).to_pylist()
        chosen = [row for row, doc_id in enumerate(ids) if uniform(doc_id, part=1) < fraction]
        if not chosen and group is block.groups[0]:
            chosen = [0]
        if chosen:
            texts += group.read("text").column(0).take(chosen).to_pylist()
    return texts


@lru_cache(maxsize=1)
def _encoder(folder: Path, tokenizer_hash: str) -> Encoder:  # noqa: ARG001 (keys the cache)
    # A worker keeps the tokenizer between tasks; a large one takes half a second to load.
    return Encoder(folder)


@lru_cache(maxsize=1)
def _chat_encoder(folder: Path, tokenizer_hash: str) -> ChatEncoder:  # noqa: ARG001
    return ChatEncoder(folder)
