"""Whether a document that was read may be trained on, and what is masked in it."""

from pipelines.core.recipe_cleaning import Pii
from pipelines.core.recipe_data import Data
from pipelines.data.filters import build_filters, first_rejection
from pipelines.data.normalize import Document, conversation, document
from pipelines.data.pii import Scrubber
from pipelines.data.tally import Reject, Tally

PII = "pii"  # the reason
_EXCERPT = 200  # characters of a rejected document that a person is shown


class Cleaner:
    """Filters documents, and looks for personal data in those that pass."""

    def __init__(self, data: Data) -> None:
        self._filters = build_filters(data.filters)
        self._pii = data.pii.action
        self._scrubber = Scrubber(data.pii)
        self._masker = Scrubber(Pii(action="mask", phone_region=data.pii.phone_region))

    def clean(self, found: Document, tally: Tally) -> Document | None:
        """The document as it is to be kept, or None; either way it is tallied."""
        reason = found.dropped or first_rejection(self._filters, found.text)
        if reason is None and self._pii != "off":
            found, reason = self._scrub(found, tally)
        if reason is None:
            tally.keep(found.bytes)
            return found
        tally.drop(found, reason)
        if tally.wants_sample(reason):
            tally.add_sample(reason, Reject(found.source, found.detail or self._excerpt(found)))
        return None

    def _scrub(self, found: Document, tally: Tally) -> tuple[Document, str | None]:
        turns = found.messages or (("", found.text),)
        scrubbed = [(role, self._scrubber.scrub(content)) for role, content in turns]
        for _, part in scrubbed:
            tally.pii.update(part.counts)
        if not any(part.counts for _, part in scrubbed):
            return found, None
        if self._pii == "drop":
            return found, PII
        if self._pii == "mask":
            masked = tuple((role, part.text) for role, part in scrubbed)
            if found.messages:
                return conversation(found.source, masked), None
            return document(found.source, masked[0][1]), None
        return found, None

    def _excerpt(self, found: Document) -> str:
        # Beyond the cut, too: half an address is not known as one.
        return self._masker.scrub(found.text[: 2 * _EXCERPT]).text[:_EXCERPT]
