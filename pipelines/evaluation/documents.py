"""Which documents are measured, and how they are parted among workers."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

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
