"""What several filters ask about one text, each found once and only when it is asked for."""

import re
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipelines.data.cleaning.characters import Kind, code_points, kinds
from pipelines.data.cleaning.language import Language, detect_language
from pipelines.data.cleaning.words import Hashes, Words, find_words, hash_words

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
