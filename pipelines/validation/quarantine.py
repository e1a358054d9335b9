"""The documents that an expectation does not hold of, in a file: which, why, and how they begin."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipelines.core.storage import write_text
from pipelines.data.cleaning.pii import Scrubber
from pipelines.data.documents import RowGroup
from pipelines.recipe.cleaning_section import Pii
from pipelines.validation.runner import Finding

QUARANTINE = "quarantine.jsonl"
MAX_LINES = 1000
_EXCERPT = 200  # characters
_SEEN = 4096  # characters in which personal data are looked for: more than the excerpt shows


def write_quarantine(findings: Sequence[Finding], path: Path) -> int:
    """Write the bad documents of findings, one JSON object a line, and count them.

    Keys: doc_id, split, source, check, expectation, column, reason, and excerpt, the first
    characters of the text with personal data masked. There are `MAX_LINES` at most, shared out
    evenly among the expectations; no file is written where no document is bad.
    """
    excerpts = _Excerpts()
    bad = [each for each in findings if each.bad_rows and "doc_id" in each.check.frame]
    lines = [
        json.dumps(excerpts.line(finding, row), ensure_ascii=False)
        for finding in bad
        for row in finding.bad_rows[: MAX_LINES // len(bad)]
    ]
    if lines:
        write_text(path, "".join(f"{line}\n" for line in lines))
    return len(lines)


class _Excerpts:
    def __init__(self) -> None:
        self._scrubber = Scrubber(Pii(action="mask"))
        self._rows = lru_cache(maxsize=1)(self._read)

    def line(self, finding: Finding, row: int) -> dict[str, Any]:
        """Return one bad document and what is wrong with it."""
        found = finding.check.frame.iloc[row]
        text, source = self._text_and_source(finding, found)
        return {
            "doc_id": found["doc_id"],
            "split": found["split"],
            "source": source,
            "check": finding.check.name,
            "expectation": finding.expectation.expectation_type,
            "column": " and ".join(finding.columns),
            "reason": finding.reason(row),
            # Cut after: half of an address would not be found.
            "excerpt": text and self._scrubber.scrub(text[:_SEEN]).text[:_EXCERPT],
        }

    def _text_and_source(self, finding: Finding, found: Any) -> tuple[str | None, str]:
        if "text" in found:
            return found["text"], found["source"]
        rows = self._rows(finding.check.groups[int(found["group"])])
        return rows.get(found["doc_id"], (None, ""))

    def _read(self, group: RowGroup) -> dict[str, tuple[str | None, str]]:
        table = group.read("doc_id", "text", "source")
        return {row["doc_id"]: (row["text"], row["source"]) for row in table.to_pylist()}
