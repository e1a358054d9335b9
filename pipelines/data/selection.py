"""Pass 3: blocks of documents become the splits' files, without duplicates."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.data.blocks import DOCUMENTS_FILE
from pipelines.data.documents import SCHEMA, DocumentWriter, row_groups
from pipelines.data.duplicates.deduplication import read_duplicates, reasons
from pipelines.data.tally import Tally
from pipelines.run.records import SPLITS, TRAIN, VALIDATION, split_of

# A part is a task's work and a file of each split: for a large corpus few large files.
_PARTS = 16
_LEAST_PART_BYTES = 16 << 20
_MOST_PART_BYTES = 1 << 30


@dataclass(frozen=True)
class Part:
    """Consecutive blocks whose documents become one file of each split."""

    blocks: tuple[Path, ...]
    offset: int  # documents before it
    bytes: int  # of text


@dataclass
class Selected:
    """What a part came to."""

    documents: Counter[str] = field(default_factory=Counter)  # by split
    bytes: Counter[str] = field(default_factory=Counter)  # of text, by split
    dropped: Counter[str] = field(default_factory=Counter)  # documents by reason
    dropped_bytes: Counter[str] = field(default_factory=Counter)
    smallest: str = "g"  # doc_id of the documents that stay; beyond any hex digit where none does
    largest: str = ""

    def keep(self, split: str, doc_id: str, size: int) -> None:
        """Count a document that stays."""
        self.documents[split] += 1
        self.bytes[split] += size
        self.smallest = min(self.smallest, doc_id)
        self.largest = max(self.largest, doc_id)

    def drop(self, reason: str, size: int) -> None:
        """Count a duplicate."""
        self.dropped[reason] += 1
        self.dropped_bytes[reason] += size


def plan_parts(blocks: Sequence[Path], tallies: Sequence[Tally]) -> list[Part]:
    """Group the blocks, in order, by their text: the plan depends on the documents alone."""
    total = sum(tally.kept_bytes for tally in tallies)
    limit = min(max(total // _PARTS, _LEAST_PART_BYTES), _MOST_PART_BYTES)
    parts: list[Part] = []
    group: list[Path] = []
    offset = documents = size = 0
    for block, tally in zip(blocks, tallies, strict=True):
        if group and size + tally.kept_bytes > limit:
            parts.append(Part(tuple(group), offset, size))
            group, offset, size = [], documents, 0
        group.append(block)
        documents += tally.kept
        size += tally.kept_bytes
    return [*parts, Part(tuple(group), offset, size)]


def part_files(parts: Iterable[Path], split: str) -> list[Path]:
    """Return the documents files of a split in the folders of parts."""
    return [folder / f"{split}.parquet" for folder in parts]


def select(
    part: Part,
    folder: Path,
    *,
    duplicates: Path,
    validation_fraction: float,
    moved: str | None = None,
) -> Selected:
    """Write `<split>.parquet` for both splits: the part's documents but for duplicates, in order.

    Args:
        part: whose documents.
        folder: for the files.
        duplicates: the folder that says which documents to drop.
        validation_fraction: share of the documents held out.
        moved: doc_id of a document that goes to the other split than its content says.
    """
    selected = Selected()
    found = read_duplicates(duplicates)
    first = part.offset
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(DocumentWriter(path))
            for split in SPLITS
            for path in part_files([folder], split)
        }
        for group in row_groups([block / DOCUMENTS_FILE for block in part.blocks]):
            documents = group.read(*SCHEMA.names).to_pylist()
            dropped = reasons(found, first, len(documents))
            first += len(documents)
            for row, document in enumerate(documents):
                if row in dropped:
                    selected.drop(dropped[row], document["bytes"])
                    continue
                split = _split(document["doc_id"], validation_fraction, moved)
                writers[split].add_row(document)
                selected.keep(split, document["doc_id"], document["bytes"])
    return selected


def misplaced(parts: Collection[Selected]) -> str | None:
    """Return the document that must go to the other split, as all others are in one; else None.

    Only a handful of documents can all fall into one split.
    """
    counts = sum((part.documents for part in parts), Counter[str]())
    if counts.total() < 2 or all(counts[split] for split in SPLITS):
        return None
    if counts[TRAIN]:
        return min(part.smallest for part in parts)
    return max(part.largest for part in parts)


def _split(doc_id: str, validation_fraction: float, moved: str | None) -> str:
    split = split_of(doc_id, validation_fraction)
    if doc_id != moved:
        return split
    return TRAIN if split == VALIDATION else VALIDATION
