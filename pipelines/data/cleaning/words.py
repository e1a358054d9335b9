"""Words of a text as numpy arrays: where they lie, and hashes that are the same everywhere.

A word's hash is a polynomial in its code points, modulo 2^64. Those of all words come from one
running sum over the text, so that Python never sees a single word.

What kind of character each one of a text is: one table over Unicode, looked up by numpy.
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

    SPACE = 0  # whatever `str.split` splits at
    LETTER = 1
    MARK = 2  # combining: a part of the letter before it
    NUMBER = 3
    PUNCTUATION = 4  # except # * @ \\ _
    SYMBOL = 5
    FORMAT = 6  # invisible: joiners, soft hyphens, direction marks
    CONTROL = 7  # also private-use, unassigned and surrogate
    REPLACEMENT = 8  # U+FFFD: something that could not be decoded


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
    """The characters of a text as numbers [characters]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def kinds(codes: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """The `Kind` of each character [characters]."""
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

_SEGMENT = 1 << 16  # characters under one running sum; what a longer word has beyond is not hashed
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_MIX = np.uint64(0xBF58476D1CE4E5B9)  # of splitmix64
_NGRAM_BASE = np.uint64(0x94D049BB133111EB)


class Words(NamedTuple):
    """Where the words of a text lie."""

    starts: NDArray[np.int64]  # [words]
    ends: NDArray[np.int64]  # [words], one past the last character

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Characters of each word [words]."""
        return self.ends - self.starts


def find_words(space: NDArray[np.bool_], alone: NDArray[np.bool_] | None = None) -> Words:
    """Words are what lies between whitespace, and each character that stands alone.

    Args:
        space: whether each character is whitespace [characters].
        alone: whether each character is a word by itself [characters].
    """
    inside = ~space
    joined = np.zeros(len(space) + 1, np.bool_)  # whether each character goes on with a word
    joined[1:-1] = inside[1:] & inside[:-1]
    if alone is not None:
        joined[1:-1] &= ~(alone[1:] | alone[:-1])
    return Words(
        np.flatnonzero(inside & ~joined[:-1]),
        np.flatnonzero(inside & ~joined[1:]) + 1,
    )


def hash_words(codes: NDArray[np.uint32], words: Words) -> Hashes:
    """A hash of each word [words]; equal words have equal ones, in every process."""
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
    """Hashes of n-grams and of the words that follow each, to hashes of the (n+1)-grams."""
    extended: Hashes = ngrams * _NGRAM_BASE + next_words
    return extended


def hash_ngrams(hashes: Hashes, n: int) -> Hashes:
    """A hash of each n words in a row [words - n + 1], from the hashes of the words."""
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
    # The sum over a word, shifted back as if the word stood at the segment's start.
    hashes: Hashes = (sums[ends] - sums[starts]) * inverses[starts]
    return hashes


@cache
def _powers() -> tuple[Hashes, Hashes]:
    """Powers of the base and of its inverse, modulo 2^64, from the 0th [_SEGMENT] each."""
    return _powers_of(_BASE), _powers_of(pow(_BASE, -1, 1 << 64))


def _powers_of(base: int) -> Hashes:
    factors = np.full(_SEGMENT, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)
