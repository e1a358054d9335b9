"""Where something was found in a text."""

from typing import NamedTuple


class Span(NamedTuple):
    """Characters from `start` up to `end`, and what they are."""

    start: int
    end: int
    kind: str  # of `data.pii.kinds`
