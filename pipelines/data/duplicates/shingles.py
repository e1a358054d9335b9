"""Turns texts into shingles: hashes of every n consecutive words, for a batch of texts at once.

A word is a run of letters and digits, lower-cased; characters between words do not count. In
scripts without reliable spaces between words (Chinese, Japanese, Korean, Thai, Lao, Khmer, Burmese,
Tibetan) each letter is a word. A text of fewer than n words is one shingle.

Numpy works on the code points of some 100 texts: words are sums of code points times powers of an
odd number (Karp and Rabin 1987), read from one running sum, and shingles are such sums of words.
This processes some 300 MB of text a second, while a loop over words processes 20.
"""

from collections.abc import Sequence
from functools import cache
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]
Bits = TypeVar("Bits", np.uint32, np.uint64)

_CODE_POINTS = 0x110000
_ALONE = np.uint32(1 << 31)  # marks a letter that is a word by itself
_ALONE_RANGES = (
    (0x0E00, 0x109F),  # Thai, Lao, Tibetan, Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x31FF),  # Japanese kana, Bopomofo
    (0x3400, 0x9FFF),  # Chinese
    (0xAC00, 0xD7A3),  # Korean
    (0xF900, 0xFAFF),  # Chinese, compatibility forms
    (0xFF66, 0xFF9D),  # half-width kana
    (0x20000, 0x3FFFF),  # Chinese, extensions
)


def words(texts: Sequence[str]) -> tuple[U32, Indices]:
    """Return the word hashes of all texts, one after another, and offsets [texts + 1]."""
    letters, text_starts = _letters_of(texts)
    starts = _word_starts(letters)
    # Zeros add nothing, so a word's span may reach to the start of the next word.
    sums = _LETTERS.sums(letters.astype(np.uint32, copy=False))[np.append(starts, len(letters))]
    hashes = np.diff(sums) * _LETTERS.inverses(len(letters))[starts]
    return hashes, np.searchsorted(starts, text_starts)


def shingles(hashes: U32, offsets: Indices, n: int) -> tuple[U64, Indices]:
    """Return all n-word shingles of each text, in reading order and with repetitions.

    Returns:
        Hashes and offsets as in `words`; a text of fewer than n words has one shingle, a text
        without words has none.
    """
    starts, ends = offsets[:-1], offsets[1:]
    counts = ends - starts
    kept = np.where(counts < n, np.minimum(counts, 1), counts - n + 1)
    sums = np.pad(_WORDS.sums(hashes.astype(np.uint64)), (0, n - 1), mode="edge")
    spans = sums[n:] - sums[:-n]  # from each word on, even across the ends of texts
    few = np.flatnonzero((counts < n) & (counts > 0))
    spans[starts[few]] = sums[ends[few]] - sums[starts[few]]
    inside = np.ones(len(hashes), bool)
    last = ends[:, None] - np.arange(1, n)
    inside[last[last >= (starts + kept)[:, None]]] = False
    return mix(spans * _WORDS.inverses(len(hashes)))[inside], _offsets(kept)


def _letters_of(texts: Sequence[str]) -> tuple[U32 | U8, Indices]:
    """Map texts, each with a line feed, through `_letters`; add each text's start, and the end."""
    starts = _offsets(np.fromiter(map(len, texts), np.int64, len(texts)) + 1)
    joined = "\n".join([*texts, ""])
    if joined.isascii():  # bytes are faster than code points
        return np.frombuffer(joined.encode().translate(_ascii_letters()), np.uint8), starts
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4")
    return _letters().take(codes), starts


@cache
def _ascii_letters() -> bytes:
    """Return `_letters` of the first 128 code points, a byte each, for `bytes.translate`."""
    return bytes(_letters()[:128].tolist()).ljust(256, b"\0")


@cache
def _letters() -> U32:
    """Map letters and digits to lower case, marked if a word by themselves, and others to 0."""
    table = np.zeros(_CODE_POINTS, np.uint32)
    for code, character in enumerate(map(chr, range(_CODE_POINTS))):
        if character.isalnum():
            lower = character.lower()
            table[code] = ord(lower) if len(lower) == 1 else code
    for first, last in _ALONE_RANGES:
        part = table[first : last + 1]
        part[part > 0] |= _ALONE
    return table


def _word_starts(letters: U32 | U8) -> Indices:
    inside = letters > 0
    start = inside.copy()
    start[1:] = inside[1:] > inside[:-1]
    if letters.dtype != np.uint8 and letters.max(initial=0) >= _ALONE:
        alone = letters >= _ALONE
        start |= alone
        start[1:] |= alone[:-1] & inside[1:]
    return np.flatnonzero(start)


class _Polynomial(Generic[Bits]):
    """Hashes spans of values: sums of value times power modulo 2^bits (Karp and Rabin 1987)."""

    def __init__(self, base: int, dtype: type[Bits]) -> None:
        inverse = pow(base, -1, 1 << np.iinfo(dtype).bits)
        self._bases: tuple[Bits, Bits] = (dtype(base), dtype(inverse))
        self._dtype: type[Bits] = dtype

    def sums(self, values: npt.NDArray[Bits]) -> npt.NDArray[Bits]:
        """Return running sums from 0 on, [values + 1]; their differences are sums over spans."""
        sums = np.zeros(len(values) + 1, self._dtype)
        np.multiply(values, _powers(self._bases[0], len(values)), out=sums[1:])
        return np.cumsum(sums, dtype=self._dtype, out=sums)

    def inverses(self, count: int) -> npt.NDArray[Bits]:
        """Return factors, by a span's start, that make the span's sum independent of its place."""
        return _powers(self._bases[1], count)


def _powers(base: Bits, count: int) -> npt.NDArray[Bits]:
    return _all_powers(base, 1 << count.bit_length())[:count]


@cache
def _all_powers(base: Bits, count: int) -> npt.NDArray[Bits]:
    factors = np.full(count, base)
    factors[0] = 1
    return np.cumprod(factors, dtype=base.dtype)


# 32-bit words take half the time; two words collide once in 4 billion, which matters only if
# the rest of their shingles is equal.
_LETTERS = _Polynomial(0x9E3779B1, np.uint32)
_WORDS = _Polynomial(0xC2B2AE3D27D4EB4F, np.uint64)


def mix(hashes: U64) -> U64:
    """Spread every bit over all 64 bits in place, with the finaliser of MurmurHash3."""
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(0xFF51AFD7ED558CCD)
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(0xC4CEB9FE1A85EC53)
    hashes ^= hashes >> np.uint64(33)
    return hashes


def _offsets(counts: Indices) -> Indices:
    return np.concatenate(([0], np.cumsum(counts)))
