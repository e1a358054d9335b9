"""What came of the documents that were read: the counts, and the mistakes worth a message."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipelines.core.errors import UserError
from pipelines.data.normalize import BINARY, CONTAMINATED, EMPTY, INVALID_UTF8, MALFORMED, Document

STATS = "stats.json"  # in preprocess's output
REJECTS = "rejects.jsonl"  # there too: samples of what was dropped
_SAMPLES = 20  # of what was dropped, a reason
_EXAMPLES = 20  # malformed records named in stats.json
_REMEDIES = {
    BINARY: "it is binary, not text; give UTF-8 text",
    INVALID_UTF8: "it is not UTF-8; convert it, for example with iconv",
    EMPTY: "it is empty; give a file with text",
    MALFORMED: "no record is readable",
}
_LOOSEN = "give other text, or loosen data.filters, data.pii, data.decontamination or data.dedup"


class Reject(NamedTuple):
    """One of the documents that were dropped, for a user to look at."""

    source: str
    excerpt: str  # of its text, personal data masked; or what is wrong with it


@dataclass
class Tally:
    """Counts documents in, kept and dropped by reason: of a block, or of many, in order."""

    documents: int = 0
    bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    pii: Counter[str] = field(default_factory=Counter)  # findings by kind
    malformed: list[str] = field(default_factory=list)  # the first ones, `file:line: what is wrong`
    rejects: dict[str, list[Reject]] = field(default_factory=dict)  # the first, by reason

    @classmethod
    def of(cls, blocks: Iterable["Tally"]) -> "Tally":
        """Return the tally of blocks, given in their order."""
        tally = cls()
        for block in blocks:
            tally.add(block)
        return tally

    def keep(self, size: int) -> None:
        """Count a document of this many bytes that is kept."""
        self.documents += 1
        self.bytes += size
        self.kept += 1
        self.kept_bytes += size

    def drop(self, found: Document, reason: str) -> None:
        """Count a document that is dropped."""
        self.documents += 1
        self.bytes += found.bytes
        self.dropped[reason] += 1
        if reason == MALFORMED and len(self.malformed) < _EXAMPLES:
            self.malformed.append(f"{found.source}: {found.detail}")

    def drop_kept(self, documents: Counter[str], sizes: Counter[str]) -> None:
        """Documents that were counted as kept are dropped after all: how many, by reason."""
        self.kept -= documents.total()
        self.kept_bytes -= sizes.total()
        self.dropped += documents

    def wants_sample(self, reason: str) -> bool:
        """Return whether there are few samples of what was dropped for this reason."""
        return len(self.rejects.get(reason, ())) < _SAMPLES

    def add_sample(self, reason: str, reject: Reject) -> None:
        """Keep one for a user to look at."""
        self.rejects.setdefault(reason, []).append(reject)

    def add(self, other: "Tally") -> None:
        """Take in the tally of a later block."""
        self.documents += other.documents
        self.bytes += other.bytes
        self.kept += other.kept
        self.kept_bytes += other.kept_bytes
        self.dropped += other.dropped
        self.pii += other.pii
        self.malformed += other.malformed[: _EXAMPLES - len(self.malformed)]
        for reason, rejects in other.rejects.items():
            found = self.rejects.setdefault(reason, [])
            found += rejects[: _SAMPLES - len(found)]

    def check(self, where: str, max_malformed_fraction: float) -> None:
        """Raise UserError where the documents are not fit to train on; `where` names the source."""
        self.check_malformed(where, max_malformed_fraction)
        if not self.kept:
            raise UserError(f"{where}: nothing to train on: {self._why_nothing()}")
        if self.kept < 2:
            raise UserError(
                f"{where}: only 1 document is left of {self.documents}{self._losses()}; train and "
                "validation need one each; give more text"
            )

    def check_malformed(self, where: str, max_malformed_fraction: float) -> None:
        """Raise UserError where too many records could not be read."""
        malformed = self.dropped[MALFORMED]
        if malformed > max_malformed_fraction * self.documents:
            raise UserError(
                f"{where}: {self.malformed[0]}; {malformed} of {self.documents} records are "
                f"malformed, more than data.source.max_malformed_fraction="
                f"{max_malformed_fraction:g}; fix them, set data.source.text_field, "
                "or raise the limit"
            )

    def to_dict(self, evaluation_sets: Iterable[str] = ()) -> dict[str, Any]:
        """Return the counts, as `stats.json` holds them; of the named evaluation sets also where
        none.
        """
        return {
            "documents": {
                "in": self.documents,
                "kept": self.kept,
                "dropped": dict(sorted(self.dropped.items())),
            },
            "bytes": {"in": self.bytes, "kept": self.kept_bytes},
            "malformed": list(self.malformed),
            "pii": dict(sorted(self.pii.items())),
            "contaminated": {
                name: self.dropped[CONTAMINATED + name] for name in sorted(evaluation_sets)
            },
        }

    def _why_nothing(self) -> str:
        if not self.documents:
            return "it holds no record; give a file with text"
        reason = next(iter(self.dropped))
        if self.documents == 1 and reason in _REMEDIES:
            return _REMEDIES[reason]
        remedy = "give UTF-8 text" if self.dropped.keys() <= _REMEDIES.keys() else _LOOSEN
        return f"of {self.documents} documents{self._losses()}; {remedy}"

    def _losses(self) -> str:
        return "".join(f", {count} {reason}" for reason, count in sorted(self.dropped.items()))
