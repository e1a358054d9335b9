"""What is done to a document that was read before it may be trained on."""

from pipelines.core.recipe_data import Data
from pipelines.data.normalize import Document
from pipelines.data.tally import Reject, Tally

_EXCERPT = 200  # characters of a rejected document that a person is shown


class Cleaner:
    """Cleans one document after the other."""

    def __init__(self, data: Data) -> None:
        pass

    def clean(self, found: Document, tally: Tally) -> Document | None:
        """The document as it is to be kept, or None; what is dropped is tallied with its reason."""
        if found.dropped:
            self._drop(found, found.dropped, tally)
            return None
        return found

    def _drop(self, found: Document, reason: str, tally: Tally) -> None:
        tally.drop(found, reason)
        if tally.wants(reason):
            tally.rejects.append(
                Reject(found.source, reason, found.detail or found.text[:_EXCERPT])
            )
