"""Decides whether a document may be used for training, and masks personal data in it."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.data.cleaning.decontaminate import EvaluationNgrams
from pipelines.data.cleaning.filters import build_filters, first_rejection
from pipelines.data.cleaning.pii import Scrubber
from pipelines.data.normalize import (
    CONTAMINATED,
    PII,
    Document,
    conversation,
    document,
    shared_turns,
)
from pipelines.data.reading.instruction import Fields
from pipelines.data.reading.source_fingerprint import evaluation_source
from pipelines.data.reading.sources import list_inputs
from pipelines.data.reading.text_readers import plan_reads, read_batch
from pipelines.data.tally import Reject, Tally
from pipelines.recipe.cleaning_section import Pii
from pipelines.recipe.data_section import Data, Source

NGRAMS_FILE = "ngrams.npy"  # the n-grams of an evaluation set, in its folder
_EXCERPT = 200  # characters of a rejected document that are shown to a user


EvaluationSets = tuple[tuple[str, Path], ...]  # name, and folder with its n-grams


def gather_ngrams(path: str, folder: Path, *, data: Data) -> int:
    """Write the n-grams of the evaluation set at a path; return their number.

    Raises:
        UserError: The path is missing or has no readable text, or too much of it is malformed.
    """
    source, tally = evaluation_source(data, path), Tally()
    ngrams = EvaluationNgrams.build(_texts(source, data, tally), data.decontamination.ngram)
    # Training documents with the unreadable part would not be dropped.
    tally.check_malformed(path, data.source.max_malformed_fraction)
    if not len(ngrams):
        raise UserError(
            f"{path}: it holds no text to decontaminate against; fix data.decontamination"
        )
    ngrams.save(folder / NGRAMS_FILE)
    return len(ngrams)


def _texts(source: Source, data: Data, tally: Tally) -> Iterator[str]:
    for block in plan_reads(source, list_inputs(source)):
        for found in read_batch(block, Fields.of(data)):
            if found.dropped:
                tally.drop(found, found.dropped)
            else:
                tally.keep(found.bytes)
                yield found.text


class Cleaner:
    """Filters and decontaminates documents, and looks for personal data in those that pass."""

    def __init__(self, data: Data, evaluation_sets: EvaluationSets) -> None:
        self._filters = build_filters(data.filters)
        self._ngrams = {
            CONTAMINATED + name: EvaluationNgrams.load(folder / NGRAMS_FILE)
            for name, folder in evaluation_sets
        }
        self._min_shared = data.decontamination.min_shared
        self._pii = data.pii

    @cached_property
    def _scrubber(self) -> Scrubber:
        return Scrubber(self._pii)

    @cached_property
    def _masker(self) -> Scrubber:
        return Scrubber(Pii(action="mask", phone_region=self._pii.phone_region))

    def clean(self, found: Document, tally: Tally) -> Document | None:
        """Return the cleaned document, or None if it is dropped; the tally counts both cases."""
        reason = (
            found.dropped
            or first_rejection(self._filters, found.text)
            or self._contamination(found.text)
        )
        # Last, because it is the most expensive, and masked text matches no evaluation set.
        if reason is None and self._pii.action != "off":
            found, reason = self._scrub(found, tally)
        if reason is None:
            tally.keep(found.bytes)
            return found
        tally.drop(found, reason)
        if tally.wants_sample(reason):
            tally.add_sample(reason, Reject(found.source, found.detail or self._excerpt(found)))
        return None

    def _contamination(self, text: str) -> str | None:
        for reason, ngrams in self._ngrams.items():
            if ngrams.overlap(text).shared >= self._min_shared:
                return reason
        return None

    def _scrub(self, found: Document, tally: Tally) -> tuple[Document, str | None]:
        shared = shared_turns(found.messages, found.rejected)
        turns = found.messages + found.rejected[shared:] or (("", found.text),)
        scrubbed = [(role, self._scrubber.scrub(content)) for role, content in turns]
        for _, part in scrubbed:
            tally.pii.update(part.counts)
        if not any(part.counts for _, part in scrubbed):
            return found, None
        if self._pii.action == "drop":
            return found, PII
        if self._pii.action == "mask":
            masked = tuple((role, part.text) for role, part in scrubbed)
            if not found.messages:
                return document(found.source, masked[0][1]), None
            stop = len(found.messages)
            rejected = masked[:shared] + masked[stop:] if found.rejected else ()
            cleaned = conversation(found.source, masked[:stop], rejected)
            # Answers that differed in personal data alone are no pair any more.
            return (found, PII) if cleaned.dropped else (cleaned, None)
        return found, None

    def _excerpt(self, found: Document) -> str:
        # Scrub beyond the cut, too: half an address would not be recognised.
        return self._masker.scrub(found.text[: 2 * _EXCERPT]).text[:_EXCERPT]
