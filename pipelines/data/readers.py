"""Inputs become documents: text, JSONL and Parquet, with .gz and .zst seen through.

What is a document:
- text: a file. A text file on its own, or one of more than 256 Ki characters, is cut at blank lines
  into documents of at most 16 Ki characters, so that one book can be split into train and
  validation. The standard library's files stay whole.
- JSONL: the value of `text_field` on a line.
- Parquet: the value of `text_field` in a row; other columns are not read.
"""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from pipelines.core.errors import UserError
from pipelines.core.recipe_data import Source
from pipelines.data.normalize import MALFORMED, Document, cut, decode, document, drop, normalize
from pipelines.data.sources import Input, open_input

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

BATCH_BYTES = 1 << 20  # a task's worth: small files together, large JSONL files apart
PIECE_CHARACTERS = 1 << 14
WHOLE_CHARACTERS = 1 << 18
LEAST_PIECES = 32  # what a small lone file is cut into where its lines allow
LEAST_PIECE_CHARACTERS = 64


@dataclass(frozen=True)
class Read:
    """One input, or a part of one, that is read in one go."""

    path: str  # as documents name it
    url: str
    format: str
    start: int = 0  # byte of a JSONL file, row group of a Parquet file
    stop: int | None = None
    line: int = 1  # of the first record, counted from 1
    bytes: int = 0  # on disk: the task's weight
    cut: str = "large"  # which text files are cut: `never`, `large`, `always`


def plan_reads(source: Source, inputs: Sequence[Input]) -> list[tuple[Read, ...]]:
    """Group the inputs, in order, into batches of about 1 MiB: the tasks of the first pass.

    The plan changes nothing about the documents or their order.
    """
    batches: list[tuple[Read, ...]] = []
    batch: list[Read] = []
    weight = 0
    for read in chain.from_iterable(_parts(source, found, len(inputs) == 1) for found in inputs):
        if batch and weight + read.bytes > BATCH_BYTES:
            batches.append(tuple(batch))
            batch, weight = [], 0
        batch.append(read)
        weight += read.bytes
    return [*batches, tuple(batch)] if batch else batches


def read_batch(batch: Sequence[Read], text_field: str) -> list[Document]:
    """The documents of a batch, kept and dropped, in source order: one task."""
    return [found for read in batch for found in read_documents(read, text_field)]


def read_documents(read: Read, text_field: str) -> Iterator[Document]:
    """The documents of one read, in order.

    Raises:
        UserError: the file is not what its name or `data.source.format` says, or has no such field.
    """
    if read.format == "parquet":
        return _parquet_documents(read, text_field)
    if read.format == "jsonl":
        return _jsonl_documents(read, text_field)
    return _text_documents(read)


def format_of(source: Source, path: str) -> str:
    """`text`, `jsonl` or `parquet`: what the recipe says, else by the file's name."""
    if source.kind == "stdlib":
        return "text"
    if source.format != "auto":
        return source.format
    return FORMATS.get(_without_compression(path).suffix.lower(), "text")


def _without_compression(path: str) -> Path:
    name = Path(path)
    return name.with_suffix("") if name.suffix.lower() in COMPRESSIONS else name


def _parts(source: Source, found: Input, alone: bool) -> Iterator[Read]:
    kind = format_of(source, found.path)
    whole = partial(Read, found.path, found.url, kind)
    if kind == "parquet":
        yield from _row_groups(whole, found)
    elif kind == "jsonl" and found.bytes > BATCH_BYTES and _splittable(found):
        yield from _line_ranges(whole, found)
    else:
        rule = "never" if source.kind == "stdlib" else "always" if alone else "large"
        yield whole(bytes=found.bytes, cut=rule)


def _splittable(found: Input) -> bool:
    # Finding line ends means reading the file: cheap here, a download from a store.
    return not found.is_remote and Path(found.path).suffix.lower() not in COMPRESSIONS


def _line_ranges(whole: "partial[Read]", found: Input) -> Iterator[Read]:
    """Byte ranges of about 1 MiB that begin at a line's start, with that line's number."""
    start, line, lines = 0, 1, 0
    position = 0
    with open_input(found.url) as file:
        while block := file.read(BATCH_BYTES):
            end = block.rfind(b"\n") + 1
            if end:
                lines += block.count(b"\n")
                yield whole(
                    start=start, stop=position + end, line=line, bytes=position + end - start
                )
                start, line = position + end, lines + 1
            position += len(block)
    if start < position:
        yield whole(start=start, stop=position, line=line, bytes=position - start)


def _row_groups(whole: "partial[Read]", found: Input) -> Iterator[Read]:
    with _open_parquet(found.url) as file:
        row = 1
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            size = group.total_byte_size
            yield whole(start=index, stop=index + 1, line=row, bytes=size)
            row += group.num_rows


def _text_documents(read: Read) -> Iterator[Document]:
    with _decompressed(read) as file:
        raw = file.read()
    text = decode(read.path, raw)
    if isinstance(text, Document):
        yield text
        return
    text = normalize(text)
    if read.cut == "never" or (read.cut == "large" and len(text) <= WHOLE_CHARACTERS):
        yield document(read.path, text)
        return
    limit = max(LEAST_PIECE_CHARACTERS, min(PIECE_CHARACTERS, len(text) // LEAST_PIECES))
    line = 1
    for piece in cut(text, limit):
        yield document(f"{read.path}:{line}" if limit < len(text) else read.path, piece)
        line += piece.count("\n")


def _jsonl_documents(read: Read, text_field: str) -> Iterator[Document]:
    with _decompressed(read) as file:
        position = file.seek(read.start) if read.start else 0
        for number, raw in enumerate(file, read.line):
            if raw.strip():  # a blank line, often the last, is no record
                yield _jsonl_document(f"{read.path}:{number}", raw, text_field)
            position += len(raw)
            if read.stop is not None and position >= read.stop:
                return


def _jsonl_document(source: str, raw: bytes, text_field: str) -> Document:
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return drop(source, len(raw), MALFORMED, "not UTF-8")
    except (ValueError, RecursionError) as error:
        return drop(source, len(raw), MALFORMED, f"not JSON ({error})")
    if not isinstance(value, dict):
        return drop(source, len(raw), MALFORMED, "not a JSON object")
    return _field_document(source, len(raw), value.get(text_field), text_field, list(value))


def _field_document(
    source: str, size: int, text: Any, text_field: str, fields: Sequence[str]
) -> Document:
    if isinstance(text, str):
        return document(source, text)
    if text_field in fields:
        problem = f"field {text_field!r} is {'null' if text is None else type(text).__name__}"
    else:
        problem = f"no field {text_field!r} among {', '.join(map(repr, fields[:8])) or 'none'}"
    return drop(source, size, MALFORMED, problem)


def _parquet_documents(read: Read, text_field: str) -> Iterator[Document]:
    with _open_parquet(read.url) as file:
        names = file.schema_arrow.names
        if text_field not in names:
            raise UserError(
                f"{read.path}: no column {text_field!r} among {', '.join(map(repr, names[:8]))}; "
                "set data.source.text_field"
            )
        groups = list(range(read.start, read.stop or read.start + 1))
        row = read.line
        for batch in file.iter_batches(row_groups=groups, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                yield _field_document(f"{read.path}:{row}", 0, text, text_field, names)
                row += 1


def _open_parquet(url: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(open_input(url), pre_buffer=True)
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{url}: not a Parquet file ({error}); mend it or set data.source.format"
        ) from error


@contextmanager
def _decompressed(read: Read) -> Iterator[IO[bytes]]:
    """Open an input's content; a broken archive is a person's mistake and names the file."""
    compression = COMPRESSIONS.get(Path(read.path).suffix.lower())
    with open_input(read.url) as raw:
        if compression is None:
            yield raw
            return
        import pyarrow as pa

        try:
            # Unlike zstandard's own reader, pyarrow's notices a truncated file.
            stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)
            yield io.BufferedReader(stream)
        except OSError as error:
            raise UserError(f"{read.url}: not a whole {compression} file ({error})") from error
