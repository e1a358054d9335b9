"""Documents on disk: Parquet files in source order, read back by row group.

What preprocess keeps lies in `documents/<split>-<number>.parquet` of its output: a few large files
a split, the same number of each. Their row groups hold about 1 MiB of text.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.core.errors import UserError, one_line
from pipelines.data.normalize import Document, Messages

SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("messages", pa.string()),  # of a conversation: JSON, [[role, content], …]
        pa.field("rejected", pa.string()),  # of a pair: the conversation that is not preferred
    ]
)
ROW_GROUP_BYTES = 1 << 20  # of text


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
                "messages": _dump(found.messages),
                "rejected": _dump(found.rejected),
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


def _dump(messages: Messages) -> str | None:
    return json.dumps(messages, ensure_ascii=False) if messages else None


def load_messages(column: str | None) -> Messages:
    """Return the turns of a conversation, from the column `messages` or `rejected`."""
    return tuple((role, content) for role, content in json.loads(column)) if column else ()


@contextmanager
def whole_documents(path: Path) -> Iterator[None]:
    """Raise a UserError that names a documents file, or its folder, if what is read is broken."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged ({one_line(error)}); run preprocess again") from error


def documents_folder(preprocess: Path) -> Path:
    """Return where the splits' files lie below the output folder of preprocess."""
    return preprocess / "documents"


def split_file(folder: Path, split: str, number: int = 0) -> Path:
    """Return a split's file of this number in that folder."""
    return folder / f"{split}-{number:05d}.parquet"


def split_files(folder: Path, split: str) -> list[Path]:
    """Return all of a split's files in that folder, in order."""
    return sorted(folder.glob(f"{split}-*.parquet"))


@dataclass(frozen=True)
class RowGroup:
    """About 1 MiB of documents, the least that is read at once."""

    path: Path
    index: int

    def read(self, *columns: str) -> pa.Table:
        """Return the named columns."""
        with whole_documents(self.path), pq.ParquetFile(self.path) as file:
            return file.read_row_group(self.index, columns=list(columns))


def row_groups(paths: Sequence[Path]) -> list[RowGroup]:
    """Return the row groups of documents files, in order."""
    return [
        RowGroup(path, index)
        for path in paths
        for index in range(pq.read_metadata(path).num_row_groups)
    ]


def sizes(paths: Sequence[Path]) -> npt.NDArray[np.int64]:
    """Return the bytes of each document of documents files, shape [documents]."""
    columns = [pq.read_table(path, columns=["bytes"]).column(0) for path in paths]
    return np.concatenate([np.zeros(0, np.int64), *(np.asarray(column) for column in columns)])
