"""Which documents repeat an earlier one, exactly or nearly, over any number of blocks.

Three steps, the first two of them tasks that meet only in files:

    1. for each block of documents, a task calls
           write_keys(key_file, doc_ids, texts, recipe.data.dedup)
    2. for each partition of the space of keys, a task calls
           match_partition(partition, partitions=…, key_files=…, dedup=…, folder=…)
       with the key files in source order and `partitions = partitions_for(documents, dedup)`;
       it holds some 150 MB and returns the path of the edges it wrote in `folder`
    3. the driver calls
           duplicates = find_duplicates(edge_files)
       and gives each block its rows to drop:
           rows, exact = duplicates.in_block(first, documents)

Documents are numbered over all blocks in source order, so `first` is the number of documents in the
blocks before. Documents that share a key are compared; those found the same are joined, and of each
connected component the first document stays. The result depends on the documents and their
order alone: not on the blocks, the partitions or who did which. Memory grows with the number of
duplicates in step 3 and with nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipelines.core.recipe_cleaning import Dedup
from pipelines.data.key_files import (
    EXACT,
    NEAR,
    KeyTable,
    exact_table,
    read_arrays,
    read_table,
    write_arrays,
    write_tables,
)
from pipelines.data.matching import Features, Indices, components, link
from pipelines.data.minhash import Signer, band_keys, bands, similar, sketches

_PARTITION_ENTRIES = 1 << 21  # some 50 bytes each while they are sorted
_COMPARED = 1 << 17  # documents compared at once, at most: some 400 bytes each
# Of a bucket with more documents, runs of this many are compared, each with the first one too.
# Cost stays linear, and no copy of a page that all know escapes; a pair that is unlike the first
# and falls into two runs is left to the other bands.
_LARGEST_RUN = 1 << 12
_FOLDED = 1 << 20  # edges held, at least, before they are folded into components


@dataclass(frozen=True)
class Duplicates:
    """The documents to drop, by number, ascending.

    Attributes:
        numbers: int64 [dropped].
        firsts: int64 [dropped], the document that stays in the place of each.
        exact: bool [dropped], whether an earlier document has the very same text.
    """

    numbers: Indices
    firsts: Indices
    exact: npt.NDArray[np.bool_]

    def in_block(self, first: int, documents: int) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """Rows of a block to drop, ascending, and which of them are exact duplicates.

        `first` is the number of the block's first document, `documents` how many it has.
        """
        start, stop = np.searchsorted(self.numbers, [first, first + documents])
        return self.numbers[start:stop] - first, self.exact[start:stop]


def write_keys(path: Path, doc_ids: Sequence[str], texts: Sequence[str], dedup: Dedup) -> None:
    """Write the key file of a block: its documents' SHA-256 (hex) and texts, in source order."""
    tables = {EXACT: exact_table(doc_ids)}
    if dedup.kind == "minhash":
        signatures = Signer(dedup.ngram, dedup.permutations).sign(texts)
        keys = band_keys(signatures, *bands(dedup.permutations, dedup.jaccard))
        tables[NEAR] = KeyTable.build(keys, sketches(signatures))
    write_tables(path, tables)


def partitions_for(documents: int, dedup: Dedup) -> int:
    """Into how many partitions the keys of so many documents are cut."""
    keys = 1 if dedup.kind == "exact" else 1 + bands(dedup.permutations, dedup.jaccard)[0]
    return max(1, -(-documents * keys // _PARTITION_ENTRIES))


def match_partition(
    partition: int, *, partitions: int, key_files: Sequence[Path], dedup: Dedup, folder: Path
) -> Path:
    """Compare the documents that share a key of this part of the key space; write the edges.

    Returns:
        A file in `folder` with two arrays [edges, 2] of document numbers, `exact` and `near`: a
        duplicate and the document it repeats.
    """
    low, high = ((part << 64) // partitions for part in (partition, partition + 1))
    edges = {EXACT: _match(key_files, EXACT, low, high, _equal), NEAR: _no_edges()}
    if dedup.kind == "minhash":

        def same(left: Features, right: Features) -> npt.NDArray[np.bool_]:
            return similar(left, right, dedup.jaccard)

        edges[NEAR] = _match(key_files, NEAR, low, high, same)
    path = folder / f"edges-{partition:05d}.safetensors"
    write_arrays(path, edges)
    return path


def find_duplicates(edge_files: Sequence[Path]) -> Duplicates:
    """All that `match_partition` found, as the documents to drop."""
    exact = np.unique(np.concatenate([read_arrays(path)[EXACT][:, 0] for path in edge_files]))
    folded, waiting, count = _no_edges(), [_no_edges()], 0
    for path in edge_files:
        arrays = read_arrays(path)
        waiting += [arrays[EXACT], arrays[NEAR]]
        count += len(arrays[EXACT]) + len(arrays[NEAR])
        if count > max(_FOLDED, len(folded)):
            folded, waiting, count = components(np.concatenate([folded, *waiting])), [], 0
    folded = components(np.concatenate([folded, *waiting]))
    return Duplicates(folded[:, 0], folded[:, 1], np.isin(folded[:, 0], exact))


def _match(
    key_files: Sequence[Path],
    table: str,
    low: int,
    high: int,
    same: Callable[[Features, Features], npt.NDArray[np.bool_]],
) -> Indices:
    """Edges [edges, 2], duplicate and first, of the documents with a key in this range."""
    block_starts, keys, numbers = _read_entries(key_files, table, low, high)
    numbers, starts = _buckets(keys, numbers)
    numbers, starts = _runs(numbers, starts)
    found = [_no_edges()]
    for chunk, chunk_starts in _chunks(numbers, starts):
        documents, index = np.unique(chunk, return_inverse=True)
        features = _read_features(key_files, table, block_starts, documents)
        found.append(chunk[link(features, index, chunk_starts, same)])
    return components(np.concatenate(found))


def _read_entries(
    key_files: Sequence[Path], table: str, low: int, high: int
) -> tuple[Indices, npt.NDArray[np.uint64], Indices]:
    """The first number of each block; keys in the range and their documents' numbers."""
    sizes, keys, numbers = [0], [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for path in key_files:
        block = read_table(path, table)
        found, rows = block.between(low, high)
        keys.append(found)
        numbers.append(rows + sizes[-1])
        sizes.append(sizes[-1] + len(block.features))
    return np.array(sizes), np.concatenate(keys), np.concatenate(numbers)


def _buckets(keys: npt.NDArray[np.uint64], numbers: Indices) -> tuple[Indices, Indices]:
    """Documents that share a key with another, bucket by bucket, and where each bucket starts."""
    order = np.argsort(keys, kind="stable")  # numbers ascend within a bucket
    keys, numbers = keys[order], numbers[order]
    equal = keys[1:] == keys[:-1]
    shared = np.append(equal, False) | np.insert(equal, 0, False)
    keys, numbers = keys[shared], numbers[shared]
    starts = np.flatnonzero(np.insert(keys[1:] != keys[:-1], 0, True)) if len(keys) else keys
    return numbers, starts.astype(np.int64)


def _runs(numbers: Indices, starts: Indices) -> tuple[Indices, Indices]:
    """Cut large buckets into runs, the bucket's first document at the head of each."""
    sizes = np.diff(np.append(starts, len(numbers)))
    heads = np.repeat(starts, sizes)
    position = np.arange(len(numbers)) - heads
    cuts = np.flatnonzero((position > 1) & ((position - 1) % (_LARGEST_RUN - 1) == 0))
    starts = np.sort(np.concatenate([starts, cuts]))
    return np.insert(numbers, cuts, numbers[heads[cuts]]), starts + np.searchsorted(cuts, starts)


def _chunks(numbers: Indices, starts: Indices) -> Iterator[tuple[Indices, Indices]]:
    """Whole runs together, as many as are compared at once."""
    ends = np.append(starts[1:], len(numbers))
    first = 0
    while first < len(starts):
        limit = starts[first] + _COMPARED
        last = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
        yield numbers[starts[first] : ends[last - 1]], starts[first:last] - starts[first]
        first = last


def _read_features(
    key_files: Sequence[Path], table: str, block_starts: Indices, documents: Indices
) -> Features:
    """Features of documents given by ascending number, each block's file opened once."""
    blocks = np.searchsorted(block_starts, documents, side="right") - 1
    parts = []
    for block in np.unique(blocks):
        rows = documents[blocks == block] - block_starts[block]
        parts.append(read_table(key_files[block], table).features[rows])
    return np.concatenate(parts)


def _equal(left: Features, right: Features) -> npt.NDArray[np.bool_]:
    return np.asarray((left == right).all(axis=1))


def _no_edges() -> Indices:
    return np.empty((0, 2), np.int64)
