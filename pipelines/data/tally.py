"""What came of the documents that were read: the counts, and the mistakes worth a message."""

from collections import Counter
from typing import Any

from pipelines.core.errors import UserError
from pipelines.data.normalize import BINARY, EMPTY, INVALID_UTF8, MALFORMED, Document

STATS = "stats.json"  # in preprocess's output
_EXAMPLES = 20  # malformed records named in stats.json
_REMEDIES = {
    BINARY: "it is binary, not text; give UTF-8 text",
    INVALID_UTF8: "it is not UTF-8; convert it, for example with iconv",
    EMPTY: "it is empty; give a file with text",
    MALFORMED: "no record is readable",
}


class Tally:
    """Counts documents in, kept and dropped by reason."""

    def __init__(self) -> None:
        self.documents = 0
        self.bytes = 0
        self.kept = 0
        self.kept_bytes = 0
        self.dropped: Counter[str] = Counter()
        self.malformed: list[str] = []  # the first ones, `file:line: what is wrong`

    def add(self, found: Document, reason: str | None) -> None:
        """Count one document; `reason` says why it is dropped."""
        self.documents += 1
        self.bytes += found.bytes
        if reason is None:
            self.kept += 1
            self.kept_bytes += found.bytes
            return
        self.dropped[reason] += 1
        if reason == MALFORMED and len(self.malformed) < _EXAMPLES:
            self.malformed.append(f"{found.source}: {found.detail}")

    def check(self, where: str, max_malformed_fraction: float) -> None:
        """Raise UserError where the documents are not fit to train on; `where` names the source."""
        malformed = self.dropped[MALFORMED]
        if malformed > max_malformed_fraction * self.documents:
            raise UserError(
                f"{where}: {self.malformed[0]}; {malformed} of {self.documents} records are "
                f"malformed, more than data.source.max_malformed_fraction="
                f"{max_malformed_fraction:g}; mend them, set data.source.text_field, "
                "or raise the limit"
            )
        if not self.kept:
            raise UserError(f"{where}: nothing to train on: {self._why_nothing()}")
        if self.kept < 2:
            raise UserError(
                f"{where}: only 1 document is left of {self.documents}{self._losses()}; train and "
                "validation need one each; give more text"
            )

    def to_dict(self) -> dict[str, Any]:
        """The counts, as `stats.json` holds them."""
        return {
            "documents": {
                "in": self.documents,
                "kept": self.kept,
                "dropped": dict(sorted(self.dropped.items())),
            },
            "bytes": {"in": self.bytes, "kept": self.kept_bytes},
            "malformed": list(self.malformed),
        }

    def _why_nothing(self) -> str:
        if not self.documents:
            return "it holds no record; give a file with text"
        if self.documents == 1:
            return _REMEDIES[next(iter(self.dropped))]
        return f"of {self.documents} documents{self._losses()}; give UTF-8 text"

    def _losses(self) -> str:
        return "".join(f", {count} {reason}" for reason, count in sorted(self.dropped.items()))
