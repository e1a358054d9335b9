"""The rules of Gopher's corpus, MassiveText: Rae et al. 2021, arXiv 2112.11446, section A.1.1.

A word is what lies between whitespace, punctuation included, as the paper names no tokenizer.

The filters of a recipe, in order; the first that rejects a document says why it is dropped.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.data.cleaning.filter_rules import (
    C4,
    CharacterSet,
    LanguageKept,
    Length,
    SymbolRatio,
)
from pipelines.data.cleaning.text_statistics import ENGLISH, Filter, TextStatistics
from pipelines.data.cleaning.words import Hashes, Kind, extend_ngrams
from pipelines.recipe.cleaning_section import Filters, GopherQualityFilter, GopherRepetitionFilter

_BULLETS = "-*•‣●○◦▪·\N{EN DASH}"
_ELLIPSES = ("...", "…")
_STOP_WORD = re.compile(r"\b(?:the|be|to|of|and|that|have|with)\b", re.IGNORECASE)
_TOP_NGRAMS = (2, 3, 4)
_DUPLICATE_NGRAMS = (5, 6, 7, 8, 9, 10)


class GopherQuality(Filter[GopherQualityFilter]):
    """Length, mean word length, symbols, bullets, ellipses, letters and stop words."""

    name = "gopher_quality"
    languages = ENGLISH  # stop words, and how long words are

    def reject(self, text: TextStatistics) -> str | None:
        """The first rule of the paper that the text breaks."""
        return self._words(text) or self._symbols(text) or self._lines(text) or self._letters(text)

    def _words(self, text: TextStatistics) -> str | None:
        words = len(text.words.starts)
        if words < self.limits.min_words:
            return "too_few_words"
        if words > self.limits.max_words:
            return "too_many_words"
        mean_length = text.words.lengths.sum() / words
        if mean_length < self.limits.min_mean_word_length:
            return "short_words"
        if mean_length > self.limits.max_mean_word_length:
            return "long_words"
        return None

    def _symbols(self, text: TextStatistics) -> str | None:
        limit = self.limits.max_symbols_per_word * len(text.words.starts)
        if text.text.count("#") > limit:
            return "too_many_hashes"
        if sum(map(text.text.count, _ELLIPSES)) > limit:
            return "too_many_ellipses"
        return None

    def _lines(self, text: TextStatistics) -> str | None:
        lines = text.lines
        bullets = sum(line[0] in _BULLETS for line in lines)
        if bullets > self.limits.max_bullet_lines * len(lines):
            return "too_many_bullet_lines"
        ellipses = sum(line.endswith(_ELLIPSES) for line in lines)
        if ellipses > self.limits.max_ellipsis_lines * len(lines):
            return "too_many_ellipsis_lines"
        return None

    def _letters(self, text: TextStatistics) -> str | None:
        letters, starts = text.kinds == Kind.LETTER, text.words.starts
        least = self.limits.min_alphabetic_words * len(starts)
        # Most texts have enough words that begin with a letter; that is cheap to see.
        if np.count_nonzero(letters[starts]) < least:
            alphabetic = np.count_nonzero(np.logical_or.reduceat(letters, starts))
            if alphabetic < least:
                return "too_few_alphabetic_words"
        if self._stop_words(text.text) < self.limits.min_stop_words:
            return "too_few_stop_words"
        return None

    def _stop_words(self, text: str) -> int:
        """Different stop words, counted no further than needed."""
        found: set[str] = set()
        for word in _STOP_WORD.finditer(text):
            found.add(word[0].lower())
            if len(found) >= self.limits.min_stop_words:
                break
        return len(found)


class GopherRepetition(Filter[GopherRepetitionFilter]):
    """Table A1: lines, paragraphs and n-grams that come again.

    Every occurrence but the first is a duplicate. Shares of n-grams are of the characters of
    words; a character that lies in several duplicates counts once.
    """

    name = "gopher_repetition"

    def __init__(self, limits: GopherRepetitionFilter) -> None:
        super().__init__(limits)
        self._top = dict(zip(_TOP_NGRAMS, limits.max_top_ngram, strict=True))
        self._duplicate = dict(zip(_DUPLICATE_NGRAMS, limits.max_duplicate_ngrams, strict=True))
        self._least_duplicate = min(limits.max_duplicate_ngrams)

    def reject(self, text: TextStatistics) -> str | None:
        """The first line of the table that the text breaks."""
        limits = self.limits
        lines = _duplicates(text.lines)
        if lines.share > limits.max_duplicate_lines:
            return "duplicate_lines"
        if lines.character_share > limits.max_duplicate_line_characters:
            return "duplicate_line_characters"
        paragraphs = _duplicates(text.paragraphs)
        if paragraphs.share > limits.max_duplicate_paragraphs:
            return "duplicate_paragraphs"
        if paragraphs.character_share > limits.max_duplicate_paragraph_characters:
            return "duplicate_paragraph_characters"
        return self._ngrams(text)

    def _ngrams(self, text: TextStatistics) -> str | None:
        ends = np.concatenate(([0], np.cumsum(text.words.lengths)))
        for n, found in _repeated_ngrams(text.word_hashes):
            if n in self._top:
                if _characters_in_top(found, ends, n) > self._top[n] * ends[-1]:
                    return f"top_{n}_gram"
                continue
            share = _characters_in_duplicates(found, ends, n) / ends[-1]
            if share > self._duplicate[n]:
                return f"duplicate_{n}_grams"
            if share <= self._least_duplicate:
                return None  # a duplicate of n + 1 words lies in duplicates of n
        return None


class _Duplicates(NamedTuple):
    share: float
    character_share: float


def _duplicates(parts: list[str]) -> _Duplicates:
    different = set(parts)
    if len(different) == len(parts):
        return _Duplicates(0.0, 0.0)
    characters = sum(map(len, parts))
    return _Duplicates(1 - len(different) / len(parts), 1 - sum(map(len, different)) / characters)


class _Repeated(NamedTuple):
    """The n-grams of a text that come more than once, equal ones side by side in text order."""

    positions: NDArray[np.int64]  # [repeated], which word each starts with
    first: NDArray[np.bool_]  # [repeated], whether it is the first of its kind


def _repeated_ngrams(hashes: Hashes) -> Iterator[tuple[int, _Repeated]]:
    """The repeated n-grams for n from 2 to 10, as long as there are any.

    An n-gram can come again only where its first n-1 words do: each n looks at those alone.
    """
    ngrams = hashes.copy()  # at each word, the hash of the n words from there
    positions = np.arange(len(hashes))
    for n in range(_TOP_NGRAMS[0], _DUPLICATE_NGRAMS[-1] + 1):
        positions = positions[positions <= len(hashes) - n]
        if not len(positions):
            return
        ngrams[positions] = extend_ngrams(ngrams[positions], hashes[positions + (n - 1)])
        found = _repeated(ngrams, positions)
        if not len(found.positions):
            return
        yield n, found
        positions = found.positions


def _repeated(ngrams: Hashes, positions: NDArray[np.int64]) -> _Repeated:
    """Which of the n-grams at `positions` come more than once.

    A position takes the place of a hash's low bits, so that one sort orders by both: that is
    several times faster than an argsort.
    """
    low = np.uint64((1 << len(ngrams).bit_length()) - 1)
    keys = np.sort((ngrams[positions] & ~low) | positions.astype(np.uint64))
    first = np.ones(len(keys) + 1, np.bool_)
    first[1:-1] = (keys[1:] ^ keys[:-1]) > low
    repeated = ~(first[:-1] & first[1:])
    return _Repeated((keys[repeated] & low).astype(np.int64), first[:-1][repeated])


def _characters_in_top(found: _Repeated, ends: NDArray[np.int64], n: int) -> int:
    """Characters in all occurrences of the most frequent n-gram; of several, the longest.

    Occurrences that overlap are counted each, but never to more than there are characters.
    """
    firsts = np.flatnonzero(found.first)
    counts = np.empty_like(firsts)
    np.subtract(firsts[1:], firsts[:-1], out=counts[:-1])
    counts[-1] = len(found.first) - firsts[-1]
    most = counts.max()
    positions = found.positions[firsts[counts == most]]
    characters = most * (ends[positions + n] - ends[positions]).max()
    return int(min(characters, ends[-1]))


def _characters_in_duplicates(found: _Repeated, ends: NDArray[np.int64], n: int) -> int:
    """Characters of the words that lie in any n-gram that was there before."""
    starts = np.sort(found.positions[~found.first])
    stops = starts + n
    np.minimum(stops[:-1], starts[1:], out=stops[:-1])
    return int((ends[stops] - ends[starts]).sum())


# Cheap ones first: a document that one of them rejects costs the others nothing.
_KINDS: tuple[type[Filter[Any]], ...] = (
    Length,
    CharacterSet,
    SymbolRatio,
    LanguageKept,
    GopherQuality,
    C4,
    GopherRepetition,
)


def build_filters(recipe: Filters) -> list[Filter[Any]]:
    """The filters that are enabled, in the order in which they are asked.

    Raises:
        UserError: a recipe names a Unicode script that there is not.
    """
    sections = ((kind, getattr(recipe, kind.name)) for kind in _KINDS)
    return [kind(limits) for kind, limits in sections if limits.enabled]


def first_rejection(filters: Sequence[Filter[Any]], text: str) -> str | None:
    """Why the first filter that rejects a text does so, as `filter:rule`; None: it is kept."""
    statistics = TextStatistics(text)
    for candidate in filters:
        if candidate.holds_for(statistics) and (rule := candidate.reject(statistics)):
            return f"{candidate.name}:{rule}"
    return None
