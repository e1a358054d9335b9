"""The filters of a recipe, in order; the first that rejects a document says why it is dropped."""

from collections.abc import Sequence
from typing import Any

from pipelines.core.recipe_cleaning import Filters
from pipelines.data.cleaning.filters_base import Filter
from pipelines.data.cleaning.filters_c4 import C4
from pipelines.data.cleaning.filters_characters import (
    CharacterSet,
    LanguageKept,
    Length,
    SymbolRatio,
)
from pipelines.data.cleaning.filters_gopher import GopherQuality, GopherRepetition
from pipelines.data.cleaning.text_statistics import TextStatistics

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
