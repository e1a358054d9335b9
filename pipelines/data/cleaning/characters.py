"""What kind of character each one of a text is: one table over Unicode, looked up by numpy."""

import sys
import unicodedata
from enum import IntEnum
from functools import cache

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
