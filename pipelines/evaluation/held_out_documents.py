"""Which documents are measured, and how they are parted among workers.

What a document is filed under when slices are made: its source, its language and its length.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from pipelines.data.cleaning.text_statistics import detect_language
from pipelines.data.documents import documents_folder, load_messages, split_files
from pipelines.data.normalize import Messages
from pipelines.data.reading.instruction import ASSISTANT


def read_documents(folder: Path, split: str, max_bytes: int) -> pa.Table:
    """Whole documents of a split, at most `max_bytes` of text but always one, by ascending id.

    Ids are hashes of the text, so the first documents in their order are a random sample, and the
    same one on every machine.

    Returns:
        Columns doc_id, source, text, bytes, and messages, which is null but for conversations.
    """
    dataset = ds.dataset(split_files(folder, split))
    sizes = dataset.to_table(columns=["doc_id", "bytes"]).sort_by("doc_id")
    fitting = int((np.cumsum(sizes["bytes"]) <= max_bytes).sum())
    last = sizes["doc_id"][max(fitting, 1) - 1]
    columns = ["doc_id", "source", "text", "bytes", "messages"]
    return dataset.to_table(columns, filter=pc.field("doc_id") <= last).sort_by("doc_id")


def read_shares(preprocess: Path, split: str, shares: Mapping[str, int]) -> dict[str, pa.Table]:
    """`read_documents` of each folder below `preprocess`, at most so many bytes of each."""
    return {
        folder: read_documents(documents_folder(preprocess / folder), split, max_bytes)
        for folder, max_bytes in shares.items()
    }


def each_once(tables: Iterable[pa.Table]) -> pa.Table:
    """The documents of all tables by ascending id; one that several datasets have is one row."""
    table = pa.concat_tables(tables).sort_by("doc_id")
    ids = table["doc_id"]
    repeats = pc.equal(ids.slice(1), ids.slice(0, len(ids) - 1))
    return table.filter(pa.chunked_array([[True], *pc.invert(repeats).chunks]))


def conversations(documents: pa.Table) -> list[Messages]:
    """The turns of each document, none where it is a plain text."""
    if "messages" not in documents.column_names:
        return [()] * len(documents)
    return [load_messages(column) for column in documents["messages"].to_pylist()]


def scored_texts(documents: pa.Table) -> list[str]:
    """What of each document a model has to predict: all of it, or what the assistant says."""
    return [
        "".join(content for role, content in messages if role == ASSISTANT) if messages else text
        for text, messages in zip(
            documents["text"].to_pylist(), conversations(documents), strict=True
        )
    ]


def part_documents(documents: pa.Table, part_bytes: int) -> list[pa.Table]:
    """Consecutive parts of about `part_bytes` of text each; a document is never divided."""
    sizes = documents["bytes"].to_numpy()
    part_of = (np.cumsum(sizes) - sizes) // part_bytes
    starts = np.flatnonzero(np.diff(part_of, prepend=-1))
    ends = np.append(starts[1:], len(sizes))
    return [documents.slice(start, end - start) for start, end in zip(starts, ends, strict=True)]


UNCERTAIN = "uncertain"  # a language that is likelier another, as of code or a few words
_LIKELY = 0.5
_LENGTHS = {
    1 << 10: "under 1 KiB",
    1 << 12: "1 to 4 KiB",
    1 << 14: "4 to 16 KiB",
    1 << 16: "16 to 64 KiB",
}
_LONGEST = "64 KiB and more"
_LINE = re.compile(r":\d+$")  # behind the file, of one record among many


def source_labels(documents: pa.Table, of_datasets: Mapping[str, pa.Table]) -> list[str]:
    """Where each document comes from: a dataset of a mixture, else a folder, else a file.

    Args:
        documents: With doc_id and source.
        of_datasets: The documents of each dataset; of one that is in several the first counts.
    """
    dataset: dict[str, str] = {}
    for label, table in reversed(list(of_datasets.items())):
        dataset |= dict.fromkeys(table["doc_id"].to_pylist(), label)
    return [
        dataset.get(doc_id) or _LINE.sub("", source).split("/")[0]
        for doc_id, source in zip(
            documents["doc_id"].to_pylist(), documents["source"].to_pylist(), strict=True
        )
    ]


def with_labels(scores: pa.Table, documents: pa.Table) -> pa.Table:
    """Scores with the columns that slices are made of.

    Args:
        scores: With bytes, a row a document.
        documents: The same, with their source's label as source, and text.
    """
    labels = {
        "source": documents["source"],
        "language": pa.array([_language(text) for text in documents["text"].to_pylist()]),
        "length": pa.array([_length(size) for size in scores["bytes"].to_pylist()]),
    }
    for name, column in labels.items():
        scores = scores.append_column(name, column)
    return scores


def _language(text: str) -> str:
    found = detect_language(text)
    return found.code if found.confidence >= _LIKELY else UNCERTAIN


def _length(size: int) -> str:
    return next((name for limit, name in _LENGTHS.items() if size < limit), _LONGEST)
