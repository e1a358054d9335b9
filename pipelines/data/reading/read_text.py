"""Text files: a file is a document, a long one several, and a very long one is read in parts."""

import re
from collections.abc import Iterator
from typing import IO

from pipelines.data.normalize import Document, cut, decode, document, normalize
from pipelines.data.reading.reads import Read, compression_of, decompressed

PIECE_CHARACTERS = 1 << 14
WHOLE_CHARACTERS = 1 << 18
LEAST_PIECES = 32  # what a small lone file is cut into where its lines allow
LEAST_PIECE_CHARACTERS = 64
PART_BYTES = 1 << 24  # of a file that is not read whole
_WINDOW = 1 << 16  # behind that, where a part may end
_ENDS = (re.compile(rb"\n[ \t\r]*\n"), re.compile(rb"\n"), re.compile(rb" "))
_CONTINUES = range(0x80, 0xC0)  # bytes within a character of UTF-8


def text_documents(read: Read) -> Iterator[Document]:
    """The documents of a file, or of one part of a very long one; see `readers`."""
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
    """The first byte of each part, the part, and whether it is the whole file.

    Parts of `PART_BYTES` give way to the text: one ends at the first blank line behind that, or
    line's end, or space, within 64 KiB. Where, the bytes there say alone, so a part that is read
    on its own is the one that is read after all before it.
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
