"""Finds and counts personal data and secrets in text, and replaces them by placeholders.

Every kind starts with a cheap test (a literal, a digit), so that clean text costs little. Matches
are then validated by `ipaddress`, a check digit, or a library that knows the number formats of
the world. Precision matters more than recall: whatever looks like a version, a date, a hash or an
example domain is ignored.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pipelines.data.cleaning.pii_finders import NumberRules, Span, find_secrets
from pipelines.recipe.cleaning_section import Pii

_EMAIL_NAME = re.compile(r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9_%+][A-Za-z0-9._%+-]*$")
_EMAIL_DOMAIN = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}"
)
_CODE_AFTER = re.compile(r"[(\[\w@=]|:[\w/~]", re.ASCII)
_LONGEST_NAME = 64  # RFC 5321
# RFC 2606 and RFC 6761 reserve these, so they belong to nobody.
_RESERVED = re.compile(
    r"(?:.*\.)?(?:example(?:\.\w+)?|test|invalid|localhost|local)", re.IGNORECASE
)
_FILE_ENDINGS = frozenset(
    ("png", "jpg", "jpeg", "gif", "svg", "webp", "ico", "css", "js", "json", "html", "pdf", "mp4")
)


class Scrubbed(NamedTuple):
    """A text after scrubbing, and how often each kind was found in it."""

    text: str
    counts: Counter[str]


class Scrubber:
    """Finds the kinds of personal data that a recipe's `data.pii` names.

    Raises:
        UserError: `phone_region` is not a country.
    """

    def __init__(self, recipe: Pii) -> None:
        self._masks = recipe.action == "mask"
        self._finders = _finders(recipe)

    def scrub(self, text: str) -> Scrubbed:
        """Count personal data and, if the action is `mask`, replace it by `<EMAIL>`, `<PHONE>`, ….

        A masked text is clean: another scrub finds nothing. A match may become visible only when
        its neighbour is masked, so passes are repeated until none is found.
        """
        counts: Counter[str] = Counter()
        masked = text
        while spans := self.find(masked):
            counts.update(span.kind for span in spans)
            masked = _mask(masked, spans)
        return Scrubbed(masked if self._masks else text, counts)

    def find(self, text: str) -> list[Span]:
        """Return the places of personal data, in text order and without overlaps."""
        return _without_overlaps([span for find in self._finders for span in find(text)], len(text))


def _finders(recipe: Pii) -> list[Callable[[str], Iterator[Span]]]:
    finders: list[Callable[[str], Iterator[Span]]] = []
    if "secret" in recipe.kinds:
        finders.append(find_secrets)
    if "email" in recipe.kinds:
        finders.append(find_emails)
    numbers = NumberRules(recipe.kinds, recipe.phone_region)
    if numbers:
        finders.append(numbers.find)
    return finders


def find_emails(text: str) -> Iterator[Span]:
    """Yield e-mail addresses, but not those of example domains or look-alikes in code."""
    at = text.find("@")
    while at >= 0:
        name = _EMAIL_NAME.search(text, max(0, at - _LONGEST_NAME), at)
        domain = _EMAIL_DOMAIN.match(text, at + 1)
        if name and domain and _is_address(text, domain):
            yield Span(name.start(), domain.end(), "email")
        at = text.find("@", at + 1)


def _is_address(text: str, domain: re.Match[str]) -> bool:
    """Return False for `a@b.dot(c)`, `git@host.com:path`, `logo@2x.png`, someone@example.com."""
    following = text[domain.end() : domain.end() + 2]
    if _CODE_AFTER.match(following):
        return False
    host = domain[0].lower()
    return host.rpartition(".")[2] not in _FILE_ENDINGS and not _RESERVED.fullmatch(host)


def _without_overlaps(spans: Sequence[Span], characters: int) -> list[Span]:
    """Sort spans by place; where two overlap, keep the one that comes first in `spans`."""
    taken = bytearray(characters if spans else 0)
    kept: list[Span] = []
    for span in spans:
        if taken.find(1, span.start, span.end) < 0:
            taken[span.start : span.end] = b"\1" * (span.end - span.start)
            kept.append(span)
    return sorted(kept)


def _mask(text: str, spans: Sequence[Span]) -> str:
    parts, position = [], 0
    for span in spans:
        parts += [text[position : span.start], f"<{span.kind.upper()}>"]
        position = span.end
    return "".join([*parts, text[position:]])
