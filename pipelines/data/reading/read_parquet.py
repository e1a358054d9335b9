"""Parquet: a record a row; only the columns that are asked for are read, a few MiB at a time."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipelines.core.errors import UserError
from pipelines.data.normalize import Document
from pipelines.data.reading.instruction import Fields, record_document
from pipelines.data.reading.reads import Read
from pipelines.data.reading.remote import RemoteError
from pipelines.data.reading.sources import open_input

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BATCH_BYTES = 1 << 22  # of values in memory at once
_BATCH_ROWS = 1 << 14
_BUFFER_BYTES = 1 << 20  # of a column, read at once


def parquet_documents(read: Read, fields: Fields) -> Iterator[Document]:
    """The documents of a file or of some row groups of it, named by row."""
    with open_parquet(read.url) as file:
        fields.check_columns(read.path, file.schema_arrow.names)
        stop = file.num_row_groups if read.stop is None else read.stop
        groups = list(range(read.start, stop))
        row = read.line or 1
        rows = _batch_rows(file, groups, fields)
        batches = file.iter_batches(rows, row_groups=groups, columns=list(fields.columns))
        for batch in _readable(read.url, batches):
            for record in batch.to_pylist():
                yield record_document(f"{read.path}:{row}", 0, record, fields)
                row += 1


def row_groups(url: str) -> list[tuple[int, int]]:
    """The rows and the bytes on disk of each row group."""
    with open_parquet(url) as file:
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        return [
            (group.num_rows, sum(group.column(i).total_compressed_size for i in range(columns)))
            for group in groups
            for columns in [group.num_columns]
        ]


def open_parquet(url: str) -> "pq.ParquetFile":
    """Open a file whose columns are then read through a buffer, so never whole.

    Raises:
        UserError: it is not a Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(open_input(url), pre_buffer=False, buffer_size=_BUFFER_BYTES)
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{url}: not a Parquet file ({error}); mend it or set data.source.format"
        ) from error


def _readable(url: str, batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    """The batches; a broken page is a person's mistake and names the file."""
    import pyarrow as pa

    try:
        yield from batches
    except RemoteError:
        raise
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{url}: not a whole Parquet file ({error})") from error


def _batch_rows(file: "pq.ParquetFile", groups: list[int], fields: Fields) -> int:
    """As many rows as are a few MiB where they are longest on average."""
    longest = 1.0
    for group in map(file.metadata.row_group, groups):
        chunks = map(group.column, range(group.num_columns))
        size = sum(
            chunk.total_uncompressed_size
            for chunk in chunks
            if chunk.path_in_schema.partition(".")[0] in fields.columns
        )
        longest = max(longest, size / max(1, group.num_rows))
    return int(max(1, min(_BATCH_ROWS, _BATCH_BYTES / longest)))
