"""What a filter is: it looks at one text and says whether, and by which rule, it is dropped."""

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from pipelines.data.cleaning.text_statistics import TextStatistics

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
