"""The rules of Gopher's corpus, MassiveText: Rae et al. 2021, arXiv 2112.11446, section A.1.1.

Words are separated by whitespace and include punctuation, as the paper names no tokenizer.

A recipe's filters run in order; the first that rejects a document gives the reason for the drop.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core import extensions
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
from pipelines.recipe.section import Extension

_BULLETS = "-*•‣●○◦▪·\N{EN DASH}"
_ELLIPSES = ("...", "…")
_STOP_WORD = re.compile(r"\b(?:the|be|to|of|and|that|have|with)\b", re.IGNORECASE)
_TOP_NGRAMS = (2, 3, 4)
_DUPLICATE_NGRAMS = (5, 6, 7, 8, 9, 10)


class GopherQuality(Filter[GopherQualityFilter]):
    """Length, mean word length, symbols, bullets, ellipses, letters and stop words."""

    name = "gopher_quality"
    languages = ENGLISH  # because of its stop words and word lengths

    def reject(self, text: TextStatistics) -> str | None:
        """Return the first rule of the paper that the text breaks."""
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
        # Most texts have enough words that begin with a letter, which is cheap to check first.
        if np.count_nonzero(letters[starts]) < least:
            alphabetic = np.count_nonzero(np.logical_or.reduceat(letters, starts))
            if alphabetic < least:
                return "too_few_alphabetic_words"
        if self._stop_words(text.text) < self.limits.min_stop_words:
            return "too_few_stop_words"
        return None

    def _stop_words(self, text: str) -> int:
        """Count different stop words, and stop at the required number."""
        found: set[str] = set()
        for word in _STOP_WORD.finditer(text):
            found.add(word[0].lower())
            if len(found) >= self.limits.min_stop_words:
                break
        return len(found)


class GopherRepetition(Filter[GopherRepetitionFilter]):
    """Table A1: repeated lines, paragraphs and n-grams.

    Every occurrence but the first is a duplicate. Shares of n-grams are shares of the words'
    characters; a character in several duplicates counts once.
    """

    name = "gopher_repetition"

    def __init__(self, limits: GopherRepetitionFilter) -> None:
        super().__init__(limits)
        self._top = dict(zip(_TOP_NGRAMS, limits.max_top_ngram, strict=True))
        self._duplicate = dict(zip(_DUPLICATE_NGRAMS, limits.max_duplicate_ngrams, strict=True))
        self._least_duplicate = min(limits.max_duplicate_ngrams)

    def reject(self, text: TextStatistics) -> str | None:
        """Return the first rule of the table that the text breaks."""
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
                return None  # a duplicate of n + 1 words lies within duplicates of n words
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
    """The repeated n-grams of a text: equal ones are adjacent and in text order."""

    positions: NDArray[np.int64]  # [repeated], index of each n-gram's first word
    first: NDArray[np.bool_]  # [repeated], whether it is the first of its kind


def _repeated_ngrams(hashes: Hashes) -> Iterator[tuple[int, _Repeated]]:
    """Yield the repeated n-grams for n from 2 to 10, as long as there are any.

    An n-gram can only repeat where its first n-1 words repeat, so each n checks only those.
    """
    ngrams = hashes.copy()  # for each word, the hash of the n words that start with it
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
    """Return which of the n-grams at `positions` occur more than once.

    The position replaces the low bits of the hash, so that one sort orders by both. This is
    several times faster than an argsort.
    """
    low = np.uint64((1 << len(ngrams).bit_length()) - 1)
    keys = np.sort((ngrams[positions] & ~low) | positions.astype(np.uint64))
    first = np.ones(len(keys) + 1, np.bool_)
    first[1:-1] = (keys[1:] ^ keys[:-1]) > low
    repeated = ~(first[:-1] & first[1:])
    return _Repeated((keys[repeated] & low).astype(np.int64), first[:-1][repeated])


def _characters_in_top(found: _Repeated, ends: NDArray[np.int64], n: int) -> int:
    """Count characters in all occurrences of the most frequent (if tied, the longest) n-gram.

    Overlapping occurrences each count, but the sum never exceeds the text's characters.
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
    """Count characters of the words in n-grams that already occurred earlier in the text."""
    starts = np.sort(found.positions[~found.first])
    stops = starts + n
    np.minimum(stops[:-1], starts[1:], out=stops[:-1])
    return int((ends[stops] - ends[starts]).sum())


# Cheap filters first: the expensive ones never see a document that a cheap one rejects.
_KINDS: tuple[type[Filter[Any]], ...] = (
    Length,
    CharacterSet,
    SymbolRatio,
    LanguageKept,
    GopherQuality,
    C4,
    GopherRepetition,
)


class ExtensionFilter(Filter[Extension]):
    """A filter of a team's own package, which sees the text only."""

    def __init__(self, limits: Extension) -> None:
        super().__init__(limits)
        self.name = limits.name  # type: ignore[misc]  # each has its own
        made = extensions.load("filters", limits.name)
        self._filter: extensions.Filter = extensions.call(
            "filters", limits.name, made, **limits.settings
        )

    def reject(self, text: TextStatistics) -> str | None:
        """Return the rule that the package's filter names, or None."""
        return self._filter.reject(text.text)


def build_filters(recipe: Filters) -> list[Filter[Any]]:
    """Return the enabled filters, in the order in which they run.

    Raises:
        UserError: The recipe names a Unicode script that does not exist, or an extension that is
            not installed or refuses its settings.
    """
    sections = ((kind, getattr(recipe, kind.name)) for kind in _KINDS)
    ours = [kind(limits) for kind, limits in sections if limits.enabled]
    return [*ours, *map(ExtensionFilter, recipe.extensions)]


def first_rejection(filters: Sequence[Filter[Any]], text: str) -> str | None:
    """Return the first rule that rejects a text, as `filter:rule`, or None to keep the text."""
    statistics = TextStatistics(text)
    for candidate in filters:
        if candidate.holds_for(statistics) and (rule := candidate.reject(statistics)):
            return f"{candidate.name}:{rule}"
    return None
