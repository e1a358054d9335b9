"""Filters that look at characters and words alone, in whatever language."""

import re

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import UserError
from pipelines.core.recipe_cleaning import (
    CharacterSetFilter,
    LanguageFilter,
    LengthFilter,
    SymbolRatioFilter,
)
from pipelines.data.cleaning.characters import CODE_POINTS, Kind
from pipelines.data.cleaning.filters_base import Filter
from pipelines.data.cleaning.text_statistics import TextStatistics

# What bytes 0x80 to 0xBF are in Windows-1252 and in Latin-1: a UTF-8 character's later bytes.
_LATER = "".join(
    {
        bytes([byte]).decode(encoding, "ignore")
        for byte in range(0x80, 0xC0)
        for encoding in ("cp1252", "latin-1")
    }
)
_MOJIBAKE = re.compile(f"[Â-ß][{_LATER}]|[à-ï][{_LATER}]{{2}}|[ð-ô][{_LATER}]{{3}}")


class Length(Filter[LengthFilter]):
    """Characters of the whole document."""

    name = "length"

    def reject(self, text: TextStatistics) -> str | None:
        """Too short or too long."""
        if len(text.text) < self.limits.min_characters:
            return "too_short"
        return "too_long" if len(text.text) > self.limits.max_characters else None


class LanguageKept(Filter[LanguageFilter]):
    """Languages on a keep list; the rule is the language that was found."""

    name = "language"

    def reject(self, text: TextStatistics) -> str | None:
        """`uncertain`, or the code of a language that is not kept."""
        if text.language.confidence < self.limits.min_confidence:
            return "uncertain"
        return None if text.language.code in self.limits.keep else text.language.code


class SymbolRatio(Filter[SymbolRatioFilter]):
    """Characters that are neither letter, mark, number, space nor common punctuation."""

    name = "symbol_ratio"

    def reject(self, text: TextStatistics) -> str | None:
        """Too many symbols, for the characters or for the words."""
        symbols = text.count(Kind.SYMBOL)
        if symbols > self.limits.max_symbol_characters * len(text.text):
            return "too_many_symbols"
        if symbols > self.limits.max_symbols_per_word * len(text.words.starts):
            return "too_many_symbols_per_word"
        return None


class CharacterSet(Filter[CharacterSetFilter]):
    """Scripts, and traces of text that was decoded wrongly."""

    name = "character_set"

    def __init__(self, limits: CharacterSetFilter) -> None:
        super().__init__(limits)
        self._outside = _letters_outside(limits.scripts) if limits.scripts else None

    def reject(self, text: TextStatistics) -> str | None:
        """The kind of character that there is too much of."""
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


def _letters_outside(scripts: tuple[str, ...]) -> NDArray[np.bool_]:
    """Of each code point [CODE_POINTS]: whether it is a letter of some other script.

    Raises:
        UserError: Unicode knows no such script.
    """
    import regex

    for script in scripts:
        try:
            regex.compile(rf"\p{{Script={script}}}")
        except regex.error:
            raise UserError(
                f"data.filters.character_set.scripts: Unicode has no script {script!r}; "
                "write names such as Latin, Hangul, Han or Cyrillic"
            ) from None
    # Common and Inherited belong to no script.
    allowed = "".join(rf"\p{{Script={script}}}" for script in ("Common", "Inherited", *scripts))
    letters = regex.compile(rf"[\p{{L}}--[{allowed}]]", regex.V1)
    outside = np.zeros(CODE_POINTS, np.bool_)
    everything = "".join(map(chr, range(CODE_POINTS)))
    outside[[found.start() for found in letters.finditer(everything)]] = True
    return outside
