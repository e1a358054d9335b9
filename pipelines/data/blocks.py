"""Pass 1: a block of input becomes a block of documents that may be trained on."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from pipelines.data.cleaning.cleaner import Cleaner, EvaluationSets
from pipelines.data.documents import DocumentWriter, row_groups
from pipelines.data.duplicates.deduplication import KEYS_FILE, write_keys
from pipelines.data.normalize import Document
from pipelines.data.reading.file_formats import Read
from pipelines.data.reading.instruction import Fields
from pipelines.data.reading.text_readers import read_batch
from pipelines.data.tally import Tally
from pipelines.recipe.data_section import Data

Block = Sequence[Read]
DOCUMENTS_FILE = "documents.parquet"


def extract(
    block: Block, folder: Path, *, data: Data, evaluation_sets: EvaluationSets, limit: int | None
) -> Tally:
    """Read a block, normalise and clean it; write the documents to keep and their keys.

    Args:
        block: what to read, in order.
        folder: for the documents, and for the keys that duplicates are matched by.
        data: of the recipe.
        evaluation_sets: whose text is not to be kept.
        limit: read no further than this many documents to keep.

    Raises:
        UserError: an input is not what it should be.
    """
    tally = Tally()
    doc_ids: list[str] = []
    path = folder / DOCUMENTS_FILE
    with DocumentWriter(path) as documents:
        for found in _kept(block, data, evaluation_sets, tally):
            documents.add(found)
            doc_ids.append(found.doc_id)
            if tally.kept == limit:
                break
    texts = (text for group in row_groups([path]) for text in group.read("text")[0].to_pylist())
    write_keys(folder / KEYS_FILE, doc_ids, texts, data.dedup)
    return tally


def _kept(
    block: Block, data: Data, evaluation_sets: EvaluationSets, tally: Tally
) -> Iterator[Document]:
    cleaner = _cleaner(data, evaluation_sets)
    for found in read_batch(block, Fields.of(data)):
        cleaned = cleaner.clean(found, tally)
        if cleaned is not None:
            yield cleaned


@lru_cache(maxsize=1)
def _cleaner(data: Data, evaluation_sets: EvaluationSets) -> Cleaner:
    # A worker keeps it between tasks: some filters load a model.
    return Cleaner(data, evaluation_sets)
