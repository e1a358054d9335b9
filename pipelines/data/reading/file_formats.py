"""Reads documents from text, JSON Lines and Parquet files.

A text file is one document, a long one is several, and a very long one is read in parts.

JSON Lines have one record a line; they are read by byte ranges, each with the lines that
begin in it.

Parquet has one record a row; only the needed columns are read, a few MiB at a time.
"""

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from pipelines.core.errors import UserError, one_line
from pipelines.data.normalize import MALFORMED, Document, cut, decode, document, drop, normalize
from pipelines.data.reading.instruction import Fields, record_document
from pipelines.data.reading.remote_files import RemoteError
from pipelines.data.reading.sources import open_input
from pipelines.recipe.section import Extension

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Read:
    """One input, or a part of it, that is read in one go."""

    path: str  # the path in the documents' names
    url: str
    format: str
    start: int = 0  # byte of a text or JSONL file; row group of a Parquet file; shard of a dataset
    stop: int | None = None
    line: int | None = 1  # of the first record, counted from 1; None if lines were not counted
    bytes: int = 0  # on disk, used as the task's weight
    cut: str = "large"  # which text files are cut: `never`, `large`, `always`
    extension: Extension | None = None  # which reads it, and no file


def compression_of(path: str) -> str | None:
    """Return `gzip` or `zstd` by a file's name, or None."""
    name = path.lower()
    return next((kind for suffix, kind in COMPRESSIONS.items() if name.endswith(suffix)), None)


@contextmanager
def decompressed(read: Read) -> Iterator[IO[bytes]]:
    """Open an input's content; raise a UserError that names the file if its archive is broken."""
    compression = compression_of(read.path)
    with open_input(read.url, read.stop) as raw:
        try:
            if compression is None:
                yield raw
                return
            import pyarrow as pa

            # Unlike zstandard's own reader, pyarrow's notices a truncated file.
            stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)
            yield io.BufferedReader(stream)
        except RemoteError:
            raise
        except OSError as error:
            what = (
                f"this {compression} file is incomplete or broken"
                if compression
                else "cannot be read"
            )
            raise UserError(f"{read.url}: {what} ({one_line(error)})") from error


PIECE_CHARACTERS = 1 << 14
WHOLE_CHARACTERS = 1 << 18
LEAST_PIECES = 32  # least pieces of a small single file, if its lines allow it
LEAST_PIECE_CHARACTERS = 64
PART_BYTES = 1 << 24  # size of the parts of a file that is not read whole
_WINDOW = 1 << 16  # a part may end within this many bytes after that size
_ENDS = (re.compile(rb"\n[ \t\r]*\n"), re.compile(rb"\n"), re.compile(rb" "))
_CONTINUES = range(0x80, 0xC0)  # continuation bytes of UTF-8 characters


def text_documents(read: Read) -> Iterator[Document]:
    """Yield the documents of a file, or of a part of a very long file; see `text_readers`."""
    with decompressed(read) as file:
        for position, raw, is_whole in _parts(file, read):
            if is_whole:
                yield from _whole_file(read, raw)
            else:
                yield from _pieces(f"{read.path}@{position}", raw, PIECE_CHARACTERS)


def _whole_file(read: Read, raw: bytes) -> Iterator[Document]:
    text = decode(read.path, raw)
    if isinstance(text, Document):
        yield text
        return
    text = normalize(text)
    if read.cut == "never" or (read.cut == "large" and len(text) <= WHOLE_CHARACTERS):
        yield document(read.path, text)
        return
    limit = max(LEAST_PIECE_CHARACTERS, min(PIECE_CHARACTERS, len(text) // LEAST_PIECES))
    if len(text) <= limit:
        yield document(read.path, text)
        return
    yield from _cut(read.path, text, limit)


def _pieces(name: str, raw: bytes, limit: int) -> Iterator[Document]:
    text = decode(name, raw)
    if isinstance(text, Document):
        yield text
        return
    yield from _cut(name, normalize(text), limit)


def _cut(name: str, text: str, limit: int) -> Iterator[Document]:
    line = 1
    for piece in cut(text, limit):
        yield document(f"{name}:{line}", piece)
        line += piece.count("\n")


def _parts(file: IO[bytes], read: Read) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the first byte of each part, the part, and whether it is the whole file.

    A part ends after `PART_BYTES` at the next blank line, else the next line end, else the next
    space, within 64 KiB. Only the bytes there decide the place, so a part has the same content
    whether it is read alone or after all parts before it.
    """
    if read.stop is None and read.bytes <= PART_BYTES and not compression_of(read.path):
        yield 0, file.read(), True
        return
    nominal = read.start
    position = file.seek(read.start) if read.start else 0
    data = file.read(_WINDOW) if read.start else b""
    begin = _end(data) if read.start else 0
    data, position = data[begin:], position + begin
    while read.stop is None or nominal < read.stop:
        nominal += PART_BYTES
        data += file.read(nominal + _WINDOW - position - len(data))
        size = nominal - position
        if len(data) <= size:
            if data or position == 0:
                yield position, data, position == 0
            return
        size += _end(data[size : size + _WINDOW])
        yield position, data[:size], False
        data, position = data[size:], position + size


def _end(window: bytes) -> int:
    for pattern in _ENDS:
        if found := pattern.search(window):
            return found.end()
    return next((i for i, byte in enumerate(window) if byte not in _CONTINUES), len(window))


LINE_BYTES = 1 << 27  # limit, because a file that is not JSON Lines may be one huge line


def jsonl_documents(read: Read, fields: Fields) -> Iterator[Document]:
    """Yield the documents of a file or byte range, named by line, or by byte if not counted."""
    with decompressed(read) as file:
        for source, raw, size in _lines(file, read):
            if len(raw) < size:
                yield drop(
                    source, size, MALFORMED, f"this line of {size} bytes is too long for a record"
                )
            elif raw.strip():  # a blank line, often the last, is not a record
                yield _document(source, raw, fields)


def _lines(file: IO[bytes], read: Read) -> Iterator[tuple[str, bytes, int]]:
    """Yield each line's name by place, at most `LINE_BYTES` of the line, and its length."""
    position, number = read.start, read.line
    if position:  # the line of the byte before belongs to another range
        file.seek(position - 1)
        most = None if read.stop is None else read.stop - position + 1
        position += _skip_line(file, most) - 1  # beyond `stop` no line begins that is ours
    while read.stop is None or position < read.stop:
        raw = file.readline(LINE_BYTES)
        if not raw:
            return
        size = len(raw)
        if size == LINE_BYTES and raw[-1:] != b"\n":
            size += _skip_line(file)
        yield f"{read.path}@{position}" if number is None else f"{read.path}:{number}", raw, size
        position += size
        number = None if number is None else number + 1


def _skip_line(file: IO[bytes], most: int | None = None) -> int:
    """Read to the end of the line, or `most` bytes, and return how many bytes were read."""
    size = 0
    while part := file.readline(min(LINE_BYTES, LINE_BYTES if most is None else most - size)):
        size += len(part)
        if part[-1:] == b"\n":
            break
    return size


def _document(source: str, raw: bytes, fields: Fields) -> Document:
    try:
        value = _parse(raw)
    except UnicodeDecodeError:
        return drop(source, len(raw), MALFORMED, "not UTF-8")
    except (ValueError, RecursionError) as error:
        return drop(source, len(raw), MALFORMED, f"not JSON ({error})")
    if not isinstance(value, dict):
        return drop(source, len(raw), MALFORMED, "not a JSON object")
    return record_document(source, len(raw), value, fields)


def _parse(raw: bytes) -> Any:
    import orjson

    try:
        return orjson.loads(raw)
    except ValueError:
        # Other tools write JSON that orjson rejects: NaN, a lone surrogate, a byte order mark.
        return json.loads(raw.decode("utf-8-sig"))


_BATCH_BYTES = 1 << 22  # bytes of values in memory at once
_BATCH_ROWS = 1 << 14
_BUFFER_BYTES = 1 << 20  # bytes of a column that are read at once


def parquet_documents(read: Read, fields: Fields) -> Iterator[Document]:
    """Yield the documents of a file or of some of its row groups, named by row."""
    with open_parquet(read.url) as file:
        columns = fields.find_columns(read.path, file.schema_arrow.names)
        stop = file.num_row_groups if read.stop is None else read.stop
        groups = list(range(read.start, stop))
        row = read.line or 1
        rows = _batch_rows(file, groups, fields)
        batches = file.iter_batches(rows, row_groups=groups, columns=columns)
        for batch in _readable(read.url, batches):
            for record in batch:
                yield record_document(f"{read.path}:{row}", 0, record, fields)
                row += 1


def row_groups(url: str) -> list[tuple[int, int]]:
    """Return the rows and the bytes on disk of each row group."""
    with open_parquet(url) as file:
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        return [
            (group.num_rows, sum(group.column(i).total_compressed_size for i in range(columns)))
            for group in groups
            for columns in [group.num_columns]
        ]


def open_parquet(url: str) -> "pq.ParquetFile":
    """Open a file whose columns are read through a buffer, so it is never in memory whole.

    Raises:
        UserError: The file is not a Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(open_input(url), pre_buffer=False, buffer_size=_BUFFER_BYTES)
        _ = file.schema_arrow  # may be broken where the rest is not
    except RemoteError:
        raise
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(
            f"{url}: not a Parquet file ({one_line(error)}); fix it or set data.source.format"
        ) from error
    return file


def _readable(url: str, batches: "Iterator[pa.RecordBatch]") -> Iterator[list[dict[str, Any]]]:
    """Yield the batches' rows; raise a UserError that names the file if a page is broken."""
    import pyarrow as pa

    try:
        for batch in batches:
            yield batch.to_pylist()
    except RemoteError:
        raise
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{url}: this Parquet file is incomplete or broken ({error})") from error


def _batch_rows(file: "pq.ParquetFile", groups: list[int], fields: Fields) -> int:
    """Return how many rows take a few MiB in the row group with the longest rows on average."""
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
