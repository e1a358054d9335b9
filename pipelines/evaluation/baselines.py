"""Baselines a model must beat: byte n-grams of its training text, and xz on the held-out text.

The n-gram of order k predicts a byte from the k bytes before it, interpolated with every shorter
context by Witten and Bell's method ("The zero-frequency problem", 1991; in the form of Chen and
Goodman, "An empirical study of smoothing techniques", 1998, section 2.4):

    P_k(x | c) = (N(c, x) + T(c) P_k-1(x | c')) / (N(c) + T(c))

N counts in the training text, T(c) is the number of distinct bytes seen after c, c' is c without
its first byte, and below order 0 lies the uniform distribution over 256 bytes.
"""

import lzma
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

ORDERS = (1, 2, 3, 5)
MAX_ORDER = 7  # a context and its next byte share one uint64

_BYTE = np.uint64(8)
_Keys = npt.NDArray[np.uint64]
_Counts = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


def ngram_bits_per_byte(
    training: Sequence[bytes], held_out: Sequence[bytes], orders: Sequence[int] = ORDERS
) -> dict[int, float]:
    """Return the bits per byte of `held_out` under an n-gram of each order fitted on `training`.

    This needs about 20 bytes of memory for each byte of training text.
    """
    probabilities = ngram_probabilities(training, held_out, max(orders))
    return {
        order: float(-np.log2(p).mean()) for order, p in enumerate(probabilities) if order in orders
    }


def ngram_probabilities(
    training: Sequence[bytes], held_out: Sequence[bytes], max_order: int
) -> Iterator[_Floats]:
    """Yield the probability of each byte of the joined `held_out`, for order 0 to max_order.

    A context never reaches into the document before: each document starts after NUL bytes.
    """
    if not 0 <= max_order <= MAX_ORDER:
        raise ValueError(f"max_order({max_order}) must be between 0 and {MAX_ORDER}")
    queries = _grams(held_out, max_order)
    probability = np.full(len(queries), 1 / 256)
    for order, (grams, counts) in enumerate(_count_orders(_grams(training, max_order), max_order)):
        query = queries & _low_bytes(order + 1)
        probability = _interpolate(grams, counts, query, probability)
        yield probability


def xz_bits_per_byte(held_out: Sequence[bytes]) -> dict[str, float]:
    """Return the bits per byte of `xz -9e`: all documents as one stream, and each by itself."""

    def size(data: bytes) -> int:
        return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    total = sum(map(len, held_out))
    return {
        "xz": size(b"".join(held_out)) / total,
        "xz-per-document": sum(map(size, held_out)) / total,
    }


def _grams(documents: Sequence[bytes], order: int) -> _Keys:
    """Return one key per byte: its lowest byte is the byte itself, the next the one before it."""
    padding = bytes(order)
    stream = np.frombuffer(padding + padding.join(documents), np.uint8)
    keys = np.zeros(len(stream) - order, np.uint64)
    for back in range(order + 1):
        shifted = stream[order - back : len(stream) - back].astype(np.uint64)
        shifted <<= np.uint64(8 * back)
        keys |= shifted
    # Between two documents lie `order` bytes of padding, which no n-gram has to predict.
    lengths = np.array([len(document) for document in documents])
    ends = np.cumsum(lengths + order)[:-1] - order
    is_padding = np.zeros(len(keys), bool)
    for offset in range(order):
        is_padding[ends + offset] = True
    return keys[~is_padding]


def _count_orders(keys: _Keys, max_order: int) -> list[tuple[_Keys, _Counts]]:
    """Return the distinct grams in ascending order and their counts, for each order from 0 up.

    Only the longest grams are sorted in full, in place. The counts of shorter grams are sums over
    their few distinct extensions.
    """
    keys.sort()
    starts = _run_starts(keys)
    tables = [(keys[starts], np.diff(starts, append=len(keys)))]
    for order in range(max_order - 1, -1, -1):
        longer, counts = tables[-1]
        shorter = longer & _low_bytes(order + 1)
        ascending = np.argsort(shorter, kind="stable")
        shorter = shorter[ascending]
        starts = _run_starts(shorter)
        tables.append((shorter[starts], np.add.reduceat(counts[ascending], starts)))
    return tables[::-1]


def _interpolate(grams: _Keys, counts: _Counts, query: _Keys, shorter: _Floats) -> _Floats:
    """Apply Witten and Bell's step; `shorter` is the probability given one context byte less."""
    starts = _run_starts(grams >> _BYTE)
    contexts = grams[starts] >> _BYTE
    followers = np.diff(starts, append=len(grams))
    totals = np.add.reduceat(counts, starts)

    # Queries in ascending order read memory forwards, which is several times faster.
    ascending = np.argsort(query, kind="stable")
    query = query[ascending]
    backed_off = shorter[ascending]
    seen = _look_up(grams, counts, query)
    total = _look_up(contexts, totals, query >> _BYTE)
    distinct = _look_up(contexts, followers, query >> _BYTE)
    known = total > 0  # after an unseen context, the shorter context's probability is kept
    backed_off[known] = (seen + distinct * backed_off)[known] / (total + distinct)[known]

    probability = np.empty_like(backed_off)
    probability[ascending] = backed_off
    return probability


def _look_up(keys: _Keys, values: _Counts, query: _Keys) -> _Counts:
    """Return the value of each queried key, or 0 if it is not among the ascending `keys`."""
    place = np.minimum(np.searchsorted(keys, query), len(keys) - 1)
    return np.where(keys[place] == query, values[place], 0)


def _run_starts(ascending: _Keys) -> _Counts:
    """Return where each run of equal keys begins."""
    changes = np.flatnonzero(ascending[1:] != ascending[:-1]) + 1
    return np.concatenate([np.zeros(1, np.int64), changes])


def _low_bytes(count: int) -> np.uint64:
    return np.uint64((1 << 8 * count) - 1)
