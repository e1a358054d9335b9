"""Pass 5: token blocks become shards, in document order."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines.core.records import Shard
from pipelines.data.tokens.packing import best_fit, write_packed
from pipelines.data.tokens.token_shards import Counts, Ids, Mask, ShardWriter, token_dtype
from pipelines.data.tokens.tokenization import IDS_FILE, MASK_FILE, SIZES_FILE

TOKENS = "tokens"  # where the shards lie in preprocess's output


@dataclass(frozen=True)
class Piece:
    """Consecutive documents of a token block."""

    block: Path
    start: int  # document
    stop: int


@dataclass(frozen=True)
class ShardPlan:
    """The documents of one shard."""

    name: str
    pieces: tuple[Piece, ...]


def plan_shards(split: str, blocks: Sequence[Path], shard_tokens: int) -> list[ShardPlan]:
    """Cut a split's documents, in order, into shards of at most `shard_tokens`.

    A document never spans two shards; one longer than `shard_tokens` has a shard to itself.
    """
    shards: list[list[Piece]] = []
    free = 0  # tokens that the last shard still takes
    for block in blocks:
        ends = np.cumsum(np.load(block / SIZES_FILE), dtype=np.int64)
        start = taken = 0
        while start < len(ends):
            stop = int(np.searchsorted(ends, taken + free, side="right"))
            if stop <= start:
                shards.append([])
                free = shard_tokens
                stop = max(start + 1, int(np.searchsorted(ends, taken + free, side="right")))
            shards[-1].append(Piece(block, start, stop))
            free -= int(ends[stop - 1]) - taken
            start, taken = stop, int(ends[stop - 1])
    return [
        ShardPlan(f"{split}-{number:05d}", tuple(pieces)) for number, pieces in enumerate(shards)
    ]


def assemble(
    plan: ShardPlan, folder: Path, *, vocab_size: int, end_id: int, capacity: int | None
) -> Shard:
    """Write one shard.

    Args:
        plan: its documents.
        folder: for its files.
        vocab_size: of the tokenizer.
        end_id: the end-of-document token.
        capacity: tokens a sample, where documents are packed into samples (best fit); else None.

    Returns:
        Its record, with the path below preprocess's output.
    """
    dtype = token_dtype(vocab_size)
    pieces = [_read(piece, dtype) for piece in plan.pieces]
    masked = capacity is not None or any(piece.mask is not None for piece in pieces)
    writer = ShardWriter(folder / plan.name, vocab_size, masked=masked)
    if capacity is None:
        for piece in pieces:
            writer.add(piece.ids, piece.sizes, piece.mask)
    else:
        whole = _join(pieces)
        packing = best_fit(whole.sizes, capacity)
        write_packed(writer, packing, whole.ids, whole.sizes, whole.mask, end_id)
    shard = writer.close()
    return shard.model_copy(update={"path": f"{TOKENS}/{shard.path}"})


class _Tokens(NamedTuple):
    """Documents end to end."""

    ids: Ids  # [tokens]
    sizes: Counts  # [documents], in tokens
    mask: Mask | None  # [tokens]


def _read(piece: Piece, dtype: np.dtype[Any]) -> _Tokens:
    """A piece's documents, memory-mapped."""
    sizes = np.load(piece.block / SIZES_FILE)
    start = int(sizes[: piece.start].sum(dtype=np.int64))
    sizes = sizes[piece.start : piece.stop]
    stop = start + int(sizes.sum(dtype=np.int64))
    ids = np.memmap(piece.block / IDS_FILE, dtype, "r")[start:stop]
    mask = piece.block / MASK_FILE
    return _Tokens(
        ids, sizes, np.memmap(mask, np.uint8, "r")[start:stop] if mask.exists() else None
    )


def _join(pieces: Sequence[_Tokens]) -> _Tokens:
    masks = [piece.mask for piece in pieces if piece.mask is not None]
    return _Tokens(
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate([piece.sizes for piece in pieces]),
        np.concatenate(masks) if masks else None,
    )
