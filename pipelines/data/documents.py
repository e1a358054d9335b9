"""Kept documents on disk: one Parquet file a split, in source order, read back by row group."""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.data.normalize import Document

SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
    ]
)
ROW_GROUP_BYTES = 1 << 20  # of text: what one task tokenises


class DocumentWriter:
    """Writes documents in the order they come.

    Row groups depend on the documents alone, so the file's bytes do too.
    """

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def add(self, found: Document) -> None:
        """Append one kept document."""
        self.add_row(
            {
                "doc_id": found.doc_id,
                "source": found.source,
                "text": found.text,
                "bytes": found.bytes,
            }
        )

    def add_row(self, row: dict[str, Any]) -> None:
        """Append one row as `read_rows` gives it."""
        self._rows.append(row)
        self._bytes += row["bytes"]
        if self._bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, SCHEMA))
        self._rows, self._bytes = [], 0


def documents_folder(preprocess: Path) -> Path:
    """Where the splits' files lie below the output folder of preprocess."""
    return preprocess / "documents"


def split_file(folder: Path, split: str) -> Path:
    """A split's file in that folder."""
    return folder / f"{split}-00000.parquet"


def documents_path(preprocess: Path, split: str) -> Path:
    """A split's file below the output folder of preprocess."""
    return split_file(documents_folder(preprocess), split)


@dataclass(frozen=True)
class RowGroup:
    """About 1 MiB of documents: what one task works on."""

    path: Path
    index: int

    def read(self, *columns: str) -> pa.Table:
        """The named columns."""
        with pq.ParquetFile(self.path) as file:
            return file.read_row_group(self.index, columns=list(columns))


def row_groups(path: Path) -> list[RowGroup]:
    """The row groups of a documents file, in order."""
    return [RowGroup(path, index) for index in range(pq.read_metadata(path).num_row_groups)]


def sizes(path: Path) -> npt.NDArray[np.int64]:
    """The bytes of each document, shape [documents]."""
    column = pq.read_table(path, columns=["bytes"]).column(0)
    return np.asarray(column, dtype=np.int64)


def move_one(source: Path, target: Path, *, smallest: bool) -> None:
    """Move the document with the smallest (or largest) hash into an empty split's file.

    Only a handful of documents can all fall into one split, so the file is read whole.
    """
    rows = pq.read_table(source).to_pylist()
    moved = (min if smallest else max)(rows, key=lambda row: row["doc_id"])
    for path, part in ((source, [row for row in rows if row is not moved]), (target, [moved])):
        with DocumentWriter(path) as writer:
            for row in part:
                writer.add_row(row)
