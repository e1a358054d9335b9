"""Best-fit packing: whole documents side by side in samples of one length.

Documents laid end to end and cut at every sample's end (`concat`) waste nothing, but cut through
many documents. Best fit cuts only those that are longer than a sample, and pads what is left over:
"Fewer Truncations Improve Language Modeling" (Ding et al., 2024, arXiv:2404.10830), section 3.

Pass 5: token blocks become shards, in document order.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipelines.data.tokens.token_shards import Counts, Ids, Mask, ShardWriter, token_dtype
from pipelines.data.tokens.tokenization import IDS_FILE, MASK_FILE, SIZES_FILE
from pipelines.run.records import Shard

Numbers = npt.NDArray[np.int64]
_CHUNK = 1 << 22  # tokens brought into their new order together
_PADDING = -1  # instead of the place where a piece begins


@dataclass(frozen=True)
class Packing:
    """Which piece of which document lies where.

    Pieces stand in the order of their samples, within a sample in that of the documents.
    """

    capacity: int  # tokens a sample
    documents: Numbers  # of each piece, [pieces]
    starts: Numbers  # of each piece within its document, in tokens
    lengths: Numbers  # of each piece, in tokens
    samples: Numbers  # pieces in each sample, [samples]

    @property
    def fill(self) -> float:
        """The fraction of the samples that is text; the rest is padding."""
        return float(self.lengths.sum()) / max(1, self.capacity * len(self.samples))


def best_fit(sizes: Counts, capacity: int) -> Packing:
    """Pack documents of `sizes` tokens, [documents], into samples of `capacity` tokens.

    A document longer than a sample is first cut into pieces of that length and a rest. The longest
    piece comes first, into the sample that it fills best. A million documents take a second.
    """
    count = -(-sizes.astype(np.int64) // capacity)  # pieces of each document
    documents = np.repeat(np.arange(len(sizes)), count)
    first = np.repeat(np.cumsum(count) - count, count)
    starts = (np.arange(len(documents)) - first) * capacity
    lengths = np.minimum(capacity, sizes[documents] - starts)
    sample = _samples(lengths, capacity)
    # Number samples by the first piece in them, so that they come in the order of the documents.
    _, leaders, sample = np.unique(sample, return_index=True, return_inverse=True)
    order = np.argsort(leaders[sample], kind="stable")
    pieces = np.bincount(sample)[np.argsort(leaders)]
    return Packing(capacity, documents[order], starts[order], lengths[order], pieces)


def pack_pairs(sizes: Counts, capacity: int) -> Packing:
    """Pack documents as `best_fit` does, but each two that follow each other as one, uncut.

    Args:
        sizes: in tokens, [documents]; a pair has at most `capacity`.
        capacity: tokens a sample.
    """
    packed = best_fit(sizes.reshape(-1, 2).sum(axis=1, dtype=np.int64), capacity)
    documents = (2 * packed.documents[:, None] + np.arange(2)).ravel()
    lengths = sizes[documents].astype(np.int64)
    return Packing(capacity, documents, np.zeros_like(documents), lengths, 2 * packed.samples)


def _samples(lengths: Numbers, capacity: int) -> Numbers:
    """Return the sample of each piece, [pieces], numbered as they are opened.

    Pieces of one length are placed together: the fullest sample that has room takes as many of
    them as fit, as it would if they came one by one, and then the next such sample.
    """
    placed = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    samples = _OpenSamples(capacity)
    at = 0
    for length, left in zip(*_runs(lengths[order]), strict=True):
        while left:
            chosen, room = samples.take(length, left)
            each = room // length
            taken = min(left, each * len(chosen))
            placed[order[at : at + taken]] = np.repeat(chosen, each)[:taken]
            full, last = divmod(taken, each)
            samples.put_back(chosen[:full], room - each * length)
            samples.put_back(chosen[full:], room - last * length)
            at += taken
            left -= taken
    return placed


class _OpenSamples:
    """Samples by the room that is left in them, in tokens."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._with_room: dict[int, list[int]] = defaultdict(list)
        self._rooms = 0  # bit r is set where a sample has room for r tokens
        self._opened = 0

    def take(self, length: int, pieces: int) -> tuple[list[int], int]:
        """Return the fullest samples with room for a piece, as many as `pieces` need, and their
        room.

        There may be fewer of them; where there are none, new ones are opened.
        """
        fitting = self._rooms >> length
        if not fitting:
            first = self._opened
            self._opened += -(-pieces // (self._capacity // length))
            return list(range(first, self._opened)), self._capacity
        room = length + (fitting & -fitting).bit_length() - 1
        samples = self._with_room[room]
        chosen = samples[-pieces // (room // length) :]
        del samples[-len(chosen) :]
        if not samples:
            self._rooms ^= 1 << room
        return chosen, room

    def put_back(self, samples: list[int], room: int) -> None:
        """Samples that have this much room now."""
        if samples and room:
            self._with_room[room] += samples
            self._rooms |= 1 << room


def _runs(values: Numbers) -> tuple[list[int], list[int]]:
    """Return each value of a descending sequence, and how often it occurs."""
    found, counts = np.unique(values, return_counts=True)
    return found[::-1].tolist(), counts[::-1].tolist()


def write_packed(
    writer: ShardWriter, packing: Packing, ids: Ids, sizes: Counts, mask: Mask | None, end_id: int
) -> None:
    """Write the samples of a packing as documents of a masked shard.

    The sequences of each are its pieces, then its padding: `end_id`, which isn't to be predicted.

    Args:
        writer: of a masked shard.
        packing: of the documents.
        ids: of the documents end to end, [tokens].
        sizes: of the documents.
        mask: what is to be predicted of them, [tokens]; None for all.
        end_id: the end-of-document token.
    """
    offsets = np.cumsum(sizes, dtype=np.int64) - sizes
    sequences = np.cumsum(packing.samples)
    text = np.diff(np.cumsum(packing.lengths)[sequences - 1], prepend=0)
    # Padding is a last piece, from nowhere; a full sample has none.
    padded = text < packing.capacity
    behind = sequences[padded]
    lengths = np.insert(packing.lengths, behind, packing.capacity - text[padded])
    begins = np.insert(offsets[packing.documents] + packing.starts, behind, _PADDING)
    samples = packing.samples + padded
    ends = np.cumsum(samples)
    step = max(1, _CHUNK // packing.capacity)
    for first in range(0, len(samples), step):
        some = samples[first : first + step]
        last = ends[first : first + step][-1]
        pieces = slice(last - some.sum(), last)
        source = _tokens_of(begins[pieces], lengths[pieces])
        is_text = source >= 0
        packed = np.where(is_text, ids[source], ids.dtype.type(end_id))
        predicted = is_text if mask is None else np.where(is_text, mask[source], 0)
        writer.add(packed, lengths[pieces], predicted.astype(np.uint8), some)


def _tokens_of(begins: Numbers, lengths: Numbers) -> Numbers:
    """Return the place of each token of pieces that follow each other; `_PADDING` for padding."""
    steps = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    from_where = np.repeat(begins, lengths)
    return np.where(from_where == _PADDING, _PADDING, from_where + steps)


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


def plan_shards(
    split: str, blocks: Sequence[Path], shard_tokens: int, *, pairs: bool = False
) -> list[ShardPlan]:
    """Cut a split's documents, in order, into shards of at most `shard_tokens`.

    A document never spans two shards, nor do `pairs` of them; one longer than `shard_tokens` has a
    shard to itself.
    """
    unit = 2 if pairs else 1
    shards: list[list[Piece]] = []
    free = 0  # tokens that the last shard still takes
    for block in blocks:
        ends = np.cumsum(np.load(block / SIZES_FILE), dtype=np.int64)[unit - 1 :: unit]
        start = taken = 0
        while start < len(ends):
            stop = int(np.searchsorted(ends, taken + free, side="right"))
            if stop <= start:
                shards.append([])
                free = shard_tokens
                stop = max(start + 1, int(np.searchsorted(ends, taken + free, side="right")))
            shards[-1].append(Piece(block, unit * start, unit * stop))
            free -= int(ends[stop - 1]) - taken
            start, taken = stop, int(ends[stop - 1])
    return [
        ShardPlan(f"{split}-{number:05d}", tuple(pieces)) for number, pieces in enumerate(shards)
    ]


def assemble(
    plan: ShardPlan,
    folder: Path,
    *,
    vocab_size: int,
    end_id: int,
    capacity: int | None,
    pairs: bool = False,
) -> Shard:
    """Write one shard.

    Args:
        plan: its documents.
        folder: for its files.
        vocab_size: of the tokenizer.
        end_id: the end-of-document token.
        capacity: tokens a sample, where documents are packed into samples (best fit); else None.
        pairs: whether each two documents are to lie in one sample.

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
        packing = (pack_pairs if pairs else best_fit)(whole.sizes, capacity)
        write_packed(writer, packing, whole.ids, whole.sizes, whole.mask, end_id)
    shard = writer.close()
    return shard.model_copy(update={"path": f"{TOKENS}/{shard.path}"})


class _Tokens(NamedTuple):
    """Documents end to end."""

    ids: Ids  # [tokens]
    sizes: Counts  # [documents], in tokens
    mask: Mask | None  # [tokens]


def _read(piece: Piece, dtype: np.dtype[Any]) -> _Tokens:
    """Return a piece's documents, memory-mapped."""
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
