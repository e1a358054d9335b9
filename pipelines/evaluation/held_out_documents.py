"""The held-out documents that are measured, and how they are divided among workers.

It also finds the labels that slices are made from: a document's source, language and length.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from pipelines.core.errors import UserError
from pipelines.data.cleaning.text_statistics import detect_language
from pipelines.data.documents import documents_folder, load_messages, split_files, whole_documents
from pipelines.data.normalize import Messages, single_answer
from pipelines.data.reading.instruction import ASSISTANT


def read_documents(folder: Path, split: str, max_bytes: int) -> pa.Table:
    """Return a split's first whole documents by id: up to `max_bytes` of text, but at least one.

    Ids are hashes of the text, so the first documents by id are a random sample, which is the same
    on every machine.

    Returns:
        Columns doc_id, source, text, bytes, messages, which only conversations have, and rejected,
        which only pairs have and earlier dataset versions lack.
    """
    with whole_documents(folder):
        dataset = ds.dataset(split_files(folder, split))
        sizes = dataset.to_table(columns=["doc_id", "bytes"]).sort_by("doc_id")
        fitting = int((np.cumsum(sizes["bytes"]) <= max_bytes).sum())
        last = sizes["doc_id"][max(fitting, 1) - 1]
        wanted = ("doc_id", "source", "text", "bytes", "messages", "rejected")
        columns = [name for name in wanted if name in dataset.schema.names]
        return dataset.to_table(columns, filter=pc.field("doc_id") <= last).sort_by("doc_id")


def read_shares(preprocess: Path, split: str, shares: Mapping[str, int]) -> dict[str, pa.Table]:
    """Return the documents of each folder below `preprocess`, up to its number of bytes."""
    return {
        folder: read_documents(documents_folder(preprocess / folder), split, max_bytes)
        for folder, max_bytes in shares.items()
    }


def each_once(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the documents of all tables by ascending id, each only once."""
    table = pa.concat_tables(tables, promote_options="default").sort_by("doc_id")
    ids = table["doc_id"]
    repeats = pc.equal(ids.slice(1), ids.slice(0, len(ids) - 1))
    return table.filter(pa.chunked_array([[True], *pc.invert(repeats).chunks]))


def without_bad_answers(documents: pa.Table) -> pa.Table:
    """Return the documents that a model is to predict: of labelled answers, the good ones.

    Raises:
        UserError: there are labelled answers, of which none is good.
    """
    if "rejected" not in documents.column_names:  # as in earlier dataset versions
        return documents
    sides = (map(load_messages, documents[name].to_pylist()) for name in ("messages", "rejected"))
    good = [single_answer(*each) != "rejected" for each in zip(*sides, strict=True)]
    if not any(good):
        raise UserError(
            "none of the held-out answers is labelled as good; raise data.validation_fraction"
        )
    return documents.filter(pa.array(good))


def conversations(documents: pa.Table) -> list[Messages]:
    """Return the turns of each document; a plain text has none."""
    if "messages" not in documents.column_names:
        return [()] * len(documents)
    try:
        return [load_messages(column) for column in documents["messages"].to_pylist()]
    except (ValueError, TypeError) as error:
        raise UserError("the documents' conversations are damaged; run preprocess again") from error


def scored_texts(documents: pa.Table) -> list[str]:
    """Return the text of each document that is scored: all of it, or only the assistant's turns."""
    return [
        "".join(content for role, content in messages if role == ASSISTANT) if messages else text
        for text, messages in zip(
            documents["text"].to_pylist(), conversations(documents), strict=True
        )
    ]


def part_documents(documents: pa.Table, part_bytes: int) -> list[pa.Table]:
    """Return consecutive parts of about `part_bytes` of text each, without dividing documents."""
    sizes = documents["bytes"].to_numpy()
    part_of = (np.cumsum(sizes) - sizes) // part_bytes
    starts = np.flatnonzero(np.diff(part_of, prepend=-1))
    ends = np.append(starts[1:], len(sizes))
    return [documents.slice(start, end - start) for start, end in zip(starts, ends, strict=True)]


UNCERTAIN = "uncertain"  # the detected language is probably wrong, as for code or a few words
_LIKELY = 0.5
_LENGTHS = {
    1 << 10: "under 1 KiB",
    1 << 12: "1 to 4 KiB",
    1 << 14: "4 to 16 KiB",
    1 << 16: "16 to 64 KiB",
}
_LONGEST = "64 KiB and more"
_LINE = re.compile(r":\d+$")  # follows the file's name if the file holds many records


def source_labels(documents: pa.Table, of_datasets: Mapping[str, pa.Table]) -> list[str]:
    """Return where each document comes from: a dataset of a mixture, else a folder, else a file.

    Args:
        documents: A table with doc_id and source.
        of_datasets: The documents of each dataset; a document in several belongs to the first.
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
    """Return the scores with the added columns that slices are made from.

    Args:
        scores: A table with bytes and one row for each document.
        documents: The same documents, with text, and with their source's label as source.
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
