"""What a model must beat: byte n-grams fitted on its training text, and xz on the held-out text.

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
    """Bits per byte of `held_out` under an n-gram of each order fitted on `training`.

    Needs about 20 bytes of memory for each byte of training text.
    """
    probabilities = ngram_probabilities(training, held_out, max(orders))
    return {
        order: float(-np.log2(p).mean()) for order, p in enumerate(probabilities) if order in orders
    }


def ngram_probabilities(
    training: Sequence[bytes], held_out: Sequence[bytes], max_order: int
) -> Iterator[_Floats]:
    """Yield for order 0 to max_order the probability of each byte of `held_out`, documents joined.

    Contexts never reach into the document before; a document starts after NUL bytes.
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
    """Bits per byte of `xz -9e`: all documents as one stream, and each by itself."""

    def size(data: bytes) -> int:
        return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    total = sum(map(len, held_out))
    return {
        "xz": size(b"".join(held_out)) / total,
        "xz-per-document": sum(map(size, held_out)) / total,
    }


def _grams(documents: Sequence[bytes], order: int) -> _Keys:
    """Give every byte one key: the byte itself lowest, the byte before it next, and so on."""
    padding = bytes(order)
    stream = np.frombuffer(padding + padding.join(documents), np.uint8)
    keys = np.zeros(len(stream) - order, np.uint64)
    for back in range(order + 1):
        shifted = stream[order - back : len(stream) - back].astype(np.uint64)
        shifted <<= np.uint64(8 * back)
        keys |= shifted
    # Between two documents lie `order` bytes of padding, which nobody predicts.
    lengths = np.array([len(document) for document in documents])
    ends = np.cumsum(lengths + order)[:-1] - order
    is_padding = np.zeros(len(keys), bool)
    for offset in range(order):
        is_padding[ends + offset] = True
    return keys[~is_padding]


def _count_orders(keys: _Keys, max_order: int) -> list[tuple[_Keys, _Counts]]:
    """Per order from 0 up: the distinct grams, ascending, and how often each occurs.

    Only the longest grams are sorted in full, in place; the shorter are sums over their few
    distinct extensions.
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
    """Witten and Bell's step: `shorter` is the probability from one context byte less."""
    starts = _run_starts(grams >> _BYTE)
    contexts = grams[starts] >> _BYTE
    followers = np.diff(starts, append=len(grams))
    totals = np.add.reduceat(counts, starts)

    # In ascending order the binary searches walk memory forwards: several times faster.
    ascending = np.argsort(query, kind="stable")
    query = query[ascending]
    backed_off = shorter[ascending]
    seen = _look_up(grams, counts, query)
    total = _look_up(contexts, totals, query >> _BYTE)
    distinct = _look_up(contexts, followers, query >> _BYTE)
    known = total > 0  # after a context never seen, the shorter context's word stands
    backed_off[known] = (seen + distinct * backed_off)[known] / (total + distinct)[known]

    probability = np.empty_like(backed_off)
    probability[ascending] = backed_off
    return probability


def _look_up(keys: _Keys, values: _Counts, query: _Keys) -> _Counts:
    """The value of each queried key, 0 where it is not among the ascending `keys`."""
    place = np.minimum(np.searchsorted(keys, query), len(keys) - 1)
    return np.where(keys[place] == query, values[place], 0)


def _run_starts(ascending: _Keys) -> _Counts:
    """Where each run of equal keys begins."""
    changes = np.flatnonzero(ascending[1:] != ascending[:-1]) + 1
    return np.concatenate([np.zeros(1, np.int64), changes])


def _low_bytes(count: int) -> np.uint64:
    return np.uint64((1 << 8 * count) - 1)
