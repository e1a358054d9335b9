"""What a document is filed under when slices are made: its source, its language and its length."""

import re
from collections.abc import Mapping

import pyarrow as pa

from pipelines.data.cleaning.language import detect_language

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
