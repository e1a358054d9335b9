"""Inputs become documents: text, JSONL, Parquet and Hugging Face datasets.

.gz and .zst are seen through. What is a document:
- text: a file. A text file on its own, or one of more than 256 Ki characters, is cut at blank lines
  into documents of at most 16 Ki characters, so that one book can be split into train and
  validation. The standard library's files stay whole.
- JSONL: what the named fields of a line hold.
- Parquet and Hugging Face datasets: the same of a row; other columns are not read.

However large a file is, a few MiB of it are held at once.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from pipelines.data.normalize import Document
from pipelines.data.reading import hub_datasets
from pipelines.data.reading.file_formats import (
    PART_BYTES,
    Read,
    compression_of,
    jsonl_documents,
    parquet_documents,
    row_groups,
    text_documents,
)
from pipelines.data.reading.inputs import Input
from pipelines.data.reading.instruction import Fields
from pipelines.data.reading.remote_files import has_ranges
from pipelines.data.reading.sources import open_input
from pipelines.recipe.data_section import Source

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
BATCH_BYTES = 1 << 20
_CHUNK = 1 << 20
_PLANNING_THREADS = 8  # what a store is asked takes its time, not ours


def plan_reads(
    source: Source, inputs: Sequence[Input], batch_bytes: int = BATCH_BYTES
) -> list[tuple[Read, ...]]:
    """Group the inputs, in order, into batches of about `batch_bytes`: the tasks of the first pass.

    Small files come together, large ones apart. The plan changes nothing about the documents, their
    order or, where a store's large JSONL files are not cut otherwise, their names.
    """
    if source.kind == "huggingface":
        reads = _dataset_shards(source, inputs)
    else:
        parts = partial(_parts, source, alone=len(inputs) == 1, batch_bytes=batch_bytes)
        with ThreadPoolExecutor(_PLANNING_THREADS) as pool:
            ask = pool.map if any(found.is_remote for found in inputs) else map
            reads = list(chain.from_iterable(ask(parts, inputs)))
    batches: list[tuple[Read, ...]] = []
    batch: list[Read] = []
    weight = 0
    for read in reads:
        if batch and weight + read.bytes > batch_bytes:
            batches.append(tuple(batch))
            batch, weight = [], 0
        batch.append(read)
        weight += read.bytes
    return [*batches, tuple(batch)] if batch else batches


def read_batch(batch: Sequence[Read], fields: Fields) -> Iterator[Document]:
    """The documents of a batch, kept and dropped, in source order: one task."""
    return chain.from_iterable(read_documents(read, fields) for read in batch)


def read_documents(read: Read, fields: Fields) -> Iterator[Document]:
    """The documents of one read, in order.

    Raises:
        UserError: the file is not what its name or `data.source.format` says, or has no such field.
        RemoteError: a store did not answer, however often it was asked.
    """
    if read.format == "parquet":
        return parquet_documents(read, fields)
    if read.format == "jsonl":
        return jsonl_documents(read, fields)
    if read.format == "huggingface":
        return hub_datasets.documents(read.url, read.path, read.start, fields)
    return text_documents(read)


def format_of(source: Source, path: str) -> str:
    """`text`, `jsonl` or `parquet`: what the recipe says, else by the file's name."""
    if source.kind == "stdlib":
        return "text"
    if source.format != "auto":
        return source.format
    name = Path(path).with_suffix("") if compression_of(path) else Path(path)
    return FORMATS.get(name.suffix.lower(), "text")


def _dataset_shards(source: Source, inputs: Sequence[Input]) -> list[Read]:
    root = hub_datasets.root_of(inputs, str(source.path))
    count = hub_datasets.shard_count(root, source.split)
    size = max(1, sum(found.bytes for found in inputs) // max(1, count))
    return [
        Read(source.split, root, "huggingface", start=shard, bytes=size) for shard in range(count)
    ]


def _parts(source: Source, found: Input, *, alone: bool, batch_bytes: int) -> list[Read]:
    return list(_cut(source, found, alone, batch_bytes))


def _cut(source: Source, found: Input, alone: bool, batch_bytes: int) -> Iterator[Read]:
    kind = format_of(source, found.path)
    whole = partial(Read, found.path, found.url, kind)
    is_large = found.bytes > batch_bytes
    if kind == "parquet" and is_large:
        yield from _row_groups(whole, found, batch_bytes)
    elif kind == "jsonl" and is_large and _splittable(found):
        ranges = _byte_ranges if found.is_remote else _line_ranges
        yield from ranges(whole, found, batch_bytes)
    elif kind == "text" and found.bytes > PART_BYTES and _splittable(found):
        # Always the same parts: a document of text depends on where its part begins.
        yield from _byte_ranges(whole, found, PART_BYTES)
    else:
        rule = "never" if source.kind == "stdlib" else "always" if alone else "large"
        yield whole(bytes=found.bytes, cut=rule)


def _splittable(found: Input) -> bool:
    if compression_of(found.path):
        return False
    return not found.is_remote or has_ranges(found.url)


def _byte_ranges(whole: "partial[Read]", found: Input, size: int) -> Iterator[Read]:
    for start in range(0, found.bytes, size):
        stop = min(start + size, found.bytes)
        yield whole(start=start, stop=stop, line=None, bytes=stop - start)


def _line_ranges(whole: "partial[Read]", found: Input, size: int) -> Iterator[Read]:
    """The same, each with the number of the first line that begins in it."""
    position = newlines = 0
    with open_input(found.url) as file:
        for part in _byte_ranges(whole, found, size):
            # Its first line begins behind the first newline from the byte before it on.
            while position < part.start - 1:
                chunk = file.read(min(_CHUNK, part.start - 1 - position))
                position += len(chunk)
                newlines += chunk.count(b"\n")
            yield replace(part, line=newlines + 2 if part.start else 1)


def _row_groups(whole: "partial[Read]", found: Input, size: int) -> Iterator[Read]:
    """Row groups together until they are about `size` on disk."""
    first, first_row, row, weight = 0, 1, 1, 0
    groups = row_groups(found.url)
    for index, (rows, group_bytes) in enumerate(groups):
        if weight and weight + group_bytes > size:
            yield whole(start=first, stop=index, line=first_row, bytes=weight)
            first, first_row, weight = index, row, 0
        row += rows
        weight += group_bytes
    yield whole(start=first, stop=len(groups), line=first_row, bytes=weight)
