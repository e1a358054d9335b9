"""Pass 5: token blocks become shards, in document order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipelines.core.records import Shard
from pipelines.core.storage import md5
from pipelines.data.token_shards import Ids, ShardWriter, bin_path, idx_path, token_dtype
from pipelines.data.tokenization import IDS_FILE, SIZES_FILE

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
    shards: list[list[Piece]] = [[]]
    free = shard_tokens
    for block in blocks:
        ends = np.cumsum(np.load(block / SIZES_FILE), dtype=np.int64)
        start = taken = 0
        while start < len(ends):
            stop = int(np.searchsorted(ends, taken + free, side="right"))
            if stop == start and shards[-1]:
                shards.append([])
                free = shard_tokens
                continue
            stop = max(stop, start + 1)
            shards[-1].append(Piece(block, start, stop))
            free -= int(ends[stop - 1]) - taken
            start, taken = stop, int(ends[stop - 1])
    return [
        ShardPlan(f"{split}-{number:05d}", tuple(pieces))
        for number, pieces in enumerate(shards)
        if pieces
    ]


def assemble(plan: ShardPlan, folder: Path, *, vocab_size: int) -> Shard:
    """Write one shard."""
    prefix = folder / plan.name
    writer = ShardWriter(prefix, vocab_size)
    for piece in plan.pieces:
        for ids in _documents(piece, vocab_size):
            writer.add(ids)
    writer.close()
    return Shard(
        path=f"{TOKENS}/{bin_path(prefix).name}",
        md5=md5(bin_path(prefix)),
        index_md5=md5(idx_path(prefix)),
        bytes=bin_path(prefix).stat().st_size,
        tokens=writer.tokens,
    )


def _documents(piece: Piece, vocab_size: int) -> Iterator[Ids]:
    sizes = np.load(piece.block / SIZES_FILE)
    ends = np.cumsum(sizes, dtype=np.int64)
    dtype = token_dtype(vocab_size)
    ids = np.memmap(piece.block / IDS_FILE, dtype, mode="r")
    for size, end in zip(
        sizes[piece.start : piece.stop].tolist(),
        ends[piece.start : piece.stop].tolist(),
        strict=True,
    ):
        yield ids[end - size : end]
