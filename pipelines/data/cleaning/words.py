"""Words of a text as numpy arrays: their places, and hashes that are the same everywhere.

A word's hash is a polynomial in its code points, modulo 2^64. One running sum over the text gives
the hashes of all words, so that Python never handles a single word.

The kinds of all characters in a text come from one table over Unicode, looked up by numpy.
"""

import sys
import unicodedata
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CODE_POINTS = sys.maxunicode + 1
_SYMBOLS_AMONG_PUNCTUATION = "#*@\\_"


class Kind(IntEnum):
    """Classes of characters, by Unicode's general categories."""

    SPACE = 0  # the characters at which `str.split` splits
    LETTER = 1
    MARK = 2  # combining: part of the letter before it
    NUMBER = 3
    PUNCTUATION = 4  # except # * @ \\ _
    SYMBOL = 5
    FORMAT = 6  # invisible: joiners, soft hyphens, direction marks
    CONTROL = 7  # also private-use, unassigned and surrogate
    REPLACEMENT = 8  # U+FFFD: bytes that could not be decoded


_KIND_OF_CATEGORY = {
    "L": Kind.LETTER,
    "M": Kind.MARK,
    "N": Kind.NUMBER,
    "P": Kind.PUNCTUATION,
    "S": Kind.SYMBOL,
    "C": Kind.CONTROL,
    "Z": Kind.SPACE,
}


def code_points(text: str) -> NDArray[np.uint32]:
    """Return the characters of a text as numbers [characters]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def kinds(codes: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return the `Kind` of each character [characters]."""
    return _kind_table()[codes]


@cache
def _kind_table() -> NDArray[np.uint8]:
    return np.fromiter(map(_kind, map(chr, range(CODE_POINTS))), np.uint8, CODE_POINTS)


def _kind(character: str) -> Kind:
    if character.isspace():
        return Kind.SPACE
    if character == "\ufffd":
        return Kind.REPLACEMENT
    if character in _SYMBOLS_AMONG_PUNCTUATION:
        return Kind.SYMBOL
    category = unicodedata.category(character)
    return Kind.FORMAT if category == "Cf" else _KIND_OF_CATEGORY[category[0]]


Hashes = NDArray[np.uint64]

_SEGMENT = 1 << 16  # characters in one running sum; a word's characters beyond it are not hashed
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_MIX = np.uint64(0xBF58476D1CE4E5B9)  # from splitmix64
_NGRAM_BASE = np.uint64(0x94D049BB133111EB)


class Words(NamedTuple):
    """The places of the words in a text."""

    starts: NDArray[np.int64]  # [words]
    ends: NDArray[np.int64]  # [words], one past the last character

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of characters of each word [words]."""
        return self.ends - self.starts


def find_words(space: NDArray[np.bool_], alone: NDArray[np.bool_] | None = None) -> Words:
    """Find the words between whitespace; each character of `alone` is a word by itself.

    Args:
        space: whether each character is whitespace [characters].
        alone: whether each character is a word by itself [characters].
    """
    inside = ~space
    joined = np.zeros(len(space) + 1, np.bool_)  # whether each character continues a word
    joined[1:-1] = inside[1:] & inside[:-1]
    if alone is not None:
        joined[1:-1] &= ~(alone[1:] | alone[:-1])
    return Words(
        np.flatnonzero(inside & ~joined[:-1]),
        np.flatnonzero(inside & ~joined[1:]) + 1,
    )


def hash_words(codes: NDArray[np.uint32], words: Words) -> Hashes:
    """Return a hash of each word [words]; equal words have equal hashes in every process."""
    hashes = np.empty(len(words.starts), np.uint64)
    first = 0
    while first < len(hashes):
        origin = words.starts[first]
        last = max(first + 1, int(np.searchsorted(words.ends, origin + _SEGMENT, side="right")))
        part = slice(first, last)
        ends = np.minimum(words.ends[part] - origin, _SEGMENT)
        hashes[part] = _hash_segment(
            codes[origin : origin + ends[-1]], words.starts[part] - origin, ends
        )
        first = last
    hashes ^= hashes >> np.uint64(31)
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(29)
    return hashes


def extend_ngrams(ngrams: Hashes, next_words: Hashes) -> Hashes:
    """Map hashes of n-grams and of each one's following word to hashes of the (n+1)-grams."""
    extended: Hashes = ngrams * _NGRAM_BASE + next_words
    return extended


def hash_ngrams(hashes: Hashes, n: int) -> Hashes:
    """Map the hashes of words to hashes of each n consecutive words [words - n + 1]."""
    count = max(0, len(hashes) - n + 1)
    ngrams = hashes[:count]
    for offset in range(1, n):
        ngrams = extend_ngrams(ngrams, hashes[offset : offset + count])
    return ngrams


def _hash_segment(
    codes: NDArray[np.uint32], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> Hashes:
    powers, inverses = _powers()
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(codes * powers[: len(codes)], out=sums[1:])
    # Shift each word's sum back as if the word were at the segment's start.
    hashes: Hashes = (sums[ends] - sums[starts]) * inverses[starts]
    return hashes


@cache
def _powers() -> tuple[Hashes, Hashes]:
    """Return powers of the base and its inverse, modulo 2^64, from the 0th, [_SEGMENT] each."""
    return _powers_of(_BASE), _powers_of(pow(_BASE, -1, 1 << 64))


def _powers_of(base: int) -> Hashes:
    factors = np.full(_SEGMENT, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)
