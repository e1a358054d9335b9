"""The rules of C4: Raffel et al. 2020, arXiv 1910.10683, section 2.2, and of its code.

C4 is made of the text blocks of web pages and drops single lines of them. Here no document is
changed: those lines are left out of account, and a document is dropped where too little is left.
Lines that were wrapped at a width are taken as the one line that they were.
"""

import re
from collections import Counter

from pipelines.core.recipe_cleaning import C4Filter
from pipelines.data.cleaning.filters_base import ENGLISH, Filter
from pipelines.data.cleaning.text_statistics import TextStatistics

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
# A line of so many characters goes on in the next: it was wrapped there. A menu's lines are short.
_WRAP = re.compile(r"\n(?<=[^\n]{50}\n)(?=[^\n])")
_SENTENCE_END = re.compile(rf"[.!?][{_CLOSING_QUOTES})\]]*(?=\s|$)")


class C4(Filter[C4Filter]):
    """Sentences, and lines that are none."""

    name = "c4"
    languages = ENGLISH  # terminal punctuation and phrases

    def reject(self, text: TextStatistics) -> str | None:
        """Why C4 would drop the document, or which line rule leaves too little of it."""
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
        """The rule by which C4 drops a line."""
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
