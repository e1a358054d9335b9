"""Turns inputs into documents: text, JSONL, Parquet and Hugging Face datasets.

.gz and .zst files are decompressed. These are the documents:
- text: a file. A single text file, or one of more than 256 Ki characters, is cut at blank lines
  into documents of at most 16 Ki characters, so that one book can be split into train and
  validation. The standard library's files stay whole.
- JSONL: the content of the named fields of a line.
- docstrings: a question about a documented name of a Python file, and its docstring.
- an extension: what it makes of a shard, as a line of JSONL.
- Parquet and Hugging Face datasets: the same fields of a row; other columns are not read.

Only a few MiB of a file are in memory at once, however large it is.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from pipelines.data.normalize import Document
from pipelines.data.reading import hub_datasets
from pipelines.data.reading.docstrings import docstring_documents
from pipelines.data.reading.extension_sources import shard_documents
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
_PLANNING_THREADS = 8  # planning mostly waits for the store's answers


def plan_reads(
    source: Source, inputs: Sequence[Input], batch_bytes: int = BATCH_BYTES
) -> list[tuple[Read, ...]]:
    """Group the inputs, in order, into batches of about `batch_bytes`: the tasks of the first pass.

    Small files are grouped, large ones are cut. The plan does not change the documents, their order
    or their names, except names in a store's large JSONL files if these are cut differently.
    """
    if source.kind == "huggingface":
        reads = _dataset_shards(source, inputs)
    elif source.kind == "extension":
        of_shard = partial(Read, format="extension", extension=source.extension)
        reads = [of_shard(each.path, each.url, bytes=each.bytes) for each in inputs]
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
    """Return the documents of a batch, kept and dropped, in source order, for one task."""
    return chain.from_iterable(read_documents(read, fields) for read in batch)


def read_documents(read: Read, fields: Fields) -> Iterator[Document]:
    """Return the documents of one read, in order.

    Raises:
        UserError: The file's format is not that of its name or `data.source.format`, or a field is
            missing.
        RemoteError: A store did not answer after several tries.
    """
    if read.extension is not None:
        return shard_documents(read.extension, read.path, fields)
    if read.format == "parquet":
        return parquet_documents(read, fields)
    if read.format == "jsonl":
        return jsonl_documents(read, fields)
    if read.format == "huggingface":
        return hub_datasets.documents(read.url, read.path, read.start, fields)
    if read.format == "docstrings":
        return docstring_documents(read, fields)
    return text_documents(read)


def format_of(source: Source, path: str) -> str:
    """Return `text`, `jsonl` or `parquet`, as the recipe says or else by the file's name."""
    if source.kind == "stdlib" and source.format == "auto":
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
        # Always cut the same parts, because a text document depends on where its part begins.
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
    """Yield byte ranges, each with the number of the first line that begins in it."""
    position = newlines = 0
    with open_input(found.url) as file:
        for part in _byte_ranges(whole, found, size):
            # The part's first line begins after the first newline at or after the byte before it.
            while position < part.start - 1:
                chunk = file.read(min(_CHUNK, part.start - 1 - position))
                position += len(chunk)
                newlines += chunk.count(b"\n")
            yield replace(part, line=newlines + 2 if part.start else 1)


def _row_groups(whole: "partial[Read]", found: Input, size: int) -> Iterator[Read]:
    """Yield reads of consecutive row groups that together take about `size` bytes on disk."""
    first, first_row, row, weight = 0, 1, 1, 0
    groups = row_groups(found.url)
    for index, (rows, group_bytes) in enumerate(groups):
        if weight and weight + group_bytes > size:
            yield whole(start=first, stop=index, line=first_row, bytes=weight)
            first, first_row, weight = index, row, 0
        row += rows
        weight += group_bytes
    yield whole(start=first, stop=len(groups), line=first_row, bytes=weight)
