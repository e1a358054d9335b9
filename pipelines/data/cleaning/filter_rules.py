"""Filters that look only at characters and words, in any language; and the rules of C4.

C4's rules are from Raffel et al. 2020, arXiv 1910.10683, section 2.2, and from its code.

C4 consists of text blocks of web pages and drops single lines of them. Here no document is changed:
those lines are only not counted, and a document is dropped if too little of it is left. Lines
that were wrapped at some width count as the one line that they were before.
"""

import re
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import UserError
from pipelines.data.cleaning.text_statistics import ENGLISH, Filter, TextStatistics
from pipelines.data.cleaning.words import CODE_POINTS, Kind
from pipelines.recipe.cleaning_section import (
    C4Filter,
    CharacterSetFilter,
    LanguageFilter,
    LengthFilter,
    SymbolRatioFilter,
)

_CLOSING_QUOTES = "\"'”\N{RIGHT SINGLE QUOTATION MARK}"
_TERMINAL = (".", "!", "?", *_CLOSING_QUOTES)
_ELLIPSES = ("...", "…")
_POLICY = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
# A line of at least 50 characters was wrapped and continues in the next; menu lines are short.
_WRAP = re.compile(r"\n(?<=[^\n]{50}\n)(?=[^\n])")
_SENTENCE_END = re.compile(rf"[.!?][{_CLOSING_QUOTES})\]]*(?=\s|$)")


class C4(Filter[C4Filter]):
    """C4's rules about sentences, and about lines that are not sentences."""

    name = "c4"
    languages = ENGLISH  # because of terminal punctuation and English phrases

    def reject(self, text: TextStatistics) -> str | None:
        """Return C4's rule for dropping the document, or the line rule that leaves too little."""
        if "{" in text.text:
            return "curly_bracket"
        lower = text.text.lower()
        if "lorem ipsum" in lower:
            return "lorem_ipsum"
        suspicious = "javascript" in lower or any(map(lower.__contains__, _POLICY))
        lost: Counter[str] = Counter()
        sentences = characters = 0
        for line in filter(None, map(str.strip, _WRAP.sub(" ", text.text).split("\n"))):
            characters += len(line)
            rule = self._line(line, suspicious)
            if rule:
                lost[rule] += len(line)
            else:
                sentences += len(_SENTENCE_END.findall(line))
        if lost.total() > (1 - self.limits.min_kept_characters) * characters:
            return max(lost, key=lambda rule: (lost[rule], rule))
        return "too_few_sentences" if sentences < self.limits.min_sentences else None

    def _line(self, line: str, suspicious: bool) -> str | None:
        """Return the rule by which C4 drops a line, or None."""
        if not line.endswith(_TERMINAL) or line.endswith(_ELLIPSES):
            return "no_terminal_punctuation"
        least = self.limits.min_words_per_line
        if len(line.split(None, least)) < least:
            return "short_lines"
        longest = self.limits.max_word_length
        if len(line) > longest and max(map(len, line.split())) > longest:
            return "long_words"
        if suspicious:
            lower = line.lower()
            if "javascript" in lower:
                return "javascript"
            if any(map(lower.__contains__, _POLICY)):
                return "policy"
        return None


# Bytes 0x80 to 0xBF in Windows-1252 and in Latin-1: the later bytes of a UTF-8 character.
_LATER = "".join(
    {
        bytes([byte]).decode(encoding, "ignore")
        for byte in range(0x80, 0xC0)
        for encoding in ("cp1252", "latin-1")
    }
)
_MOJIBAKE = re.compile(f"[Â-ß][{_LATER}]|[à-ï][{_LATER}]{{2}}|[ð-ô][{_LATER}]{{3}}")


class Length(Filter[LengthFilter]):
    """The number of characters of the whole document."""

    name = "length"

    def reject(self, text: TextStatistics) -> str | None:
        """Return `too_short`, `too_long` or None."""
        if len(text.text) < self.limits.min_characters:
            return "too_short"
        return "too_long" if len(text.text) > self.limits.max_characters else None


class LanguageKept(Filter[LanguageFilter]):
    """Languages on a keep list; the rule is the code of the language that was found."""

    name = "language"

    def reject(self, text: TextStatistics) -> str | None:
        """Return `uncertain`, or the code of a language that is not kept, or None."""
        if text.language.confidence < self.limits.min_confidence:
            return "uncertain"
        return None if text.language.code in self.limits.keep else text.language.code


class SymbolRatio(Filter[SymbolRatioFilter]):
    """Characters other than letters, marks, numbers, spaces and common punctuation."""

    name = "symbol_ratio"

    def reject(self, text: TextStatistics) -> str | None:
        """Return the rule for too many symbols per character or per word, or None."""
        symbols = text.count(Kind.SYMBOL)
        if symbols > self.limits.max_symbol_characters * len(text.text):
            return "too_many_symbols"
        if symbols > self.limits.max_symbols_per_word * len(text.words.starts):
            return "too_many_symbols_per_word"
        return None


class CharacterSet(Filter[CharacterSetFilter]):
    """Unwanted scripts, and traces of wrongly decoded text."""

    name = "character_set"

    def __init__(self, limits: CharacterSetFilter) -> None:
        super().__init__(limits)
        self._outside = _letters_outside(limits.scripts) if limits.scripts else None

    def reject(self, text: TextStatistics) -> str | None:
        """Return the kind of character of which there are too many, or None."""
        characters = len(text.text)
        if text.count(Kind.REPLACEMENT) > self.limits.max_replacement * characters:
            return "replacement_characters"
        if text.count(Kind.CONTROL) > self.limits.max_control * characters:
            return "control_characters"
        if not text.text.isascii():
            mojibake = sum(len(found) for found in _MOJIBAKE.findall(text.text))
            if mojibake > self.limits.max_mojibake * characters:
                return "mojibake"
        if self._outside is not None:
            outside = np.count_nonzero(self._outside[text.codes])
            if outside > (1 - self.limits.min_letters_in_scripts) * text.count(Kind.LETTER):
                return "other_scripts"
        return None


def check_scripts(scripts: tuple[str, ...]) -> None:
    """Raise a UserError for a script that Unicode does not have."""
    import regex

    for script in scripts:
        try:
            regex.compile(rf"\p{{Script={script}}}")
        except regex.error:
            raise UserError(
                f"data.filters.character_set.scripts: Unicode has no script {script!r}; "
                "write names such as Latin, Hangul, Han or Cyrillic"
            ) from None


def _letters_outside(scripts: tuple[str, ...]) -> NDArray[np.bool_]:
    """Return whether each code point is a letter of another script [CODE_POINTS]."""
    import regex

    check_scripts(scripts)
    # Common and Inherited belong to no script.
    allowed = "".join(rf"\p{{Script={script}}}" for script in ("Common", "Inherited", *scripts))
    letters = regex.compile(rf"[\p{{L}}--[{allowed}]]", regex.V1)
    outside = np.zeros(CODE_POINTS, np.bool_)
    everything = "".join(map(chr, range(CODE_POINTS)))
    outside[[found.start() for found in letters.finditer(everything)]] = True
    return outside
