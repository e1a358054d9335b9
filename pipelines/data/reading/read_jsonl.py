"""JSON Lines: a record a line, read by ranges of bytes; a range owns the lines that begin in it."""

import json
from collections.abc import Iterator
from typing import IO, Any

from pipelines.data.normalize import MALFORMED, Document, drop
from pipelines.data.reading.instruction import Fields, record_document
from pipelines.data.reading.reads import Read, decompressed

LINE_BYTES = 1 << 27  # at most: a file that is no JSON Lines may be one line


def jsonl_documents(read: Read, fields: Fields) -> Iterator[Document]:
    """The documents of a file or of a range of it, named by line, or by byte where none counted."""
    with decompressed(read) as file:
        for source, raw, size in _lines(file, read):
            if len(raw) < size:
                yield drop(source, size, MALFORMED, f"a line of {size} bytes, not a record a line")
            elif raw.strip():  # a blank line, often the last, is no record
                yield _document(source, raw, fields)


def _lines(file: IO[bytes], read: Read) -> Iterator[tuple[str, bytes, int]]:
    """Where each line begins, at most `LINE_BYTES` of it, and its length."""
    position, number = read.start, read.line
    if position:  # the line that the byte before belongs to is another range's
        file.seek(position - 1)
        position += _skip_line(file) - 1
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


def _skip_line(file: IO[bytes]) -> int:
    """Read to the line's end: how many bytes that took."""
    size = 0
    while part := file.readline(LINE_BYTES):
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
        # What orjson refuses and others write: NaN, a lone surrogate, a byte order mark.
        return json.loads(raw.decode("utf-8-sig"))
