"""Finds documents that repeat an earlier one, exactly or nearly, over any number of blocks.

There are three steps; the first two are tasks that exchange data only through files:

    1. for each block of documents, a task calls
           write_keys(key_file, doc_ids, texts, recipe.data.dedup)
    2. for each partition of the key space, a task calls
           match_partition(partition, partitions=…, key_files=…, dedup=…, folder=…)
       with the key files in source order and `partitions = partitions_for(documents, dedup)`;
       it uses some 150 MB of memory, and returns the path of the edges it wrote in `folder`
    3. the driver calls
           duplicates = find_duplicates(edge_files)
       and tells each block which rows to drop:
           rows, exact = duplicates.in_block(first, documents)

Documents are numbered over all blocks in source order, so `first` is the number of documents in the
blocks before. Documents that share a key are compared, the same ones are joined by edges, and each
connected component keeps only its first document. The result depends only on the documents and
their order: not on the blocks, the partitions or the tasks that handled them. Memory grows only
with the number of duplicates in step 3.

This is pass 2 of preprocess:

keys of each block ─▶ match: edges of each partition ─▶ join: the documents to drop
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipelines.data.duplicates.duplicate_keys import (
    EXACT,
    NEAR,
    SLOTS,
    KeyTable,
    exact_table,
    read_arrays,
    read_table,
    write_arrays,
    write_tables,
)
from pipelines.data.duplicates.minhash import Signer, band_keys, bands, similar, sketches
from pipelines.data.duplicates.shingles import U64, Indices
from pipelines.data.normalize import DUPLICATE, NEAR_DUPLICATE
from pipelines.recipe.cleaning_section import Dedup

Features = npt.NDArray[np.uint8]
Same = Callable[[Features, Features], npt.NDArray[np.bool_]]


def link(features: Features, index: Indices, starts: Indices, same: Same) -> Indices:
    """Return edges that join the members of each bucket into its connected components.

    All buckets are searched breadth-first at once. In each round, a bucket's pivot is compared
    with all members that are not found yet; the pivot is a found member that was no pivot before,
    or else the first member not found. Copies of one document take one round, others more.

    Args:
        features: [documents, bytes], the values that `same` compares, row by row.
        index: [members], the document of each member, bucket by bucket.
        starts: [buckets], where each bucket starts in `index`.
        same: Returns whether documents are the same, for two arrays of feature rows.

    Returns:
        Edges [edges, 2] between members.
    """
    count = len(index)
    bucket = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, count)))
    member, new = np.arange(count), np.ones(count, bool)
    edges = [np.empty((0, 2), np.int64)]
    while len(member):
        starts = np.flatnonzero(np.diff(bucket, prepend=-1))
        sizes = np.diff(np.append(starts, len(member)))
        pivot = np.repeat(np.minimum.reduceat(member + count * new, starts) % count, sizes)
        rest = member != pivot
        asked = np.flatnonzero(rest & new)
        found = asked[same(features[index[member[asked]]], features[index[pivot[asked]]])]
        edges.append(np.stack([member[found], pivot[found]], axis=1))
        new[found] = False
        rest &= np.repeat(np.logical_or.reduceat(rest & new, starts), sizes)
        member, bucket, new = member[rest], bucket[rest], new[rest]
    return np.concatenate(edges)


def components(edges: Indices) -> Indices:
    """Pair each component's later documents with its first document: [documents, 2], ascending."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    documents, ends = np.unique(edges, return_inverse=True)
    left, right = ends.reshape(-1, 2).T
    graph = coo_array((np.ones(len(left), bool), (left, right)), shape=[len(documents)] * 2)
    _, label = connected_components(graph, directed=False)
    _, first = np.unique(label, return_index=True)
    pairs = np.stack([documents, documents[first[label]]], axis=1)
    return np.asarray(pairs[pairs[:, 0] != pairs[:, 1]])


_PARTITION_ENTRIES = 1 << 21  # each takes some 50 bytes while they are sorted
_SIGNED = 256  # texts that are signed at once
_COMPARED = 1 << 17  # most documents compared at once; each takes some 400 bytes
_RUN = 1 << 10  # a bucket with more documents is compared in runs of this many
_FOLDED = 1 << 20  # fewest edges held before they are folded into components


@dataclass(frozen=True)
class Duplicates:
    """The documents to drop, by number, ascending.

    Attributes:
        numbers: int64 [dropped].
        firsts: int64 [dropped], the document that is kept instead of each.
        exact: bool [dropped], whether an earlier document has exactly the same text.
    """

    numbers: Indices
    firsts: Indices
    exact: npt.NDArray[np.bool_]

    def in_block(self, first: int, documents: int) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """Return a block's rows to drop, ascending, and which of them are exact duplicates.

        `first` is the number of the block's first document, `documents` the number of documents.
        """
        start, stop = np.searchsorted(self.numbers, [first, first + documents])
        return self.numbers[start:stop] - first, self.exact[start:stop]


def write_keys(path: Path, doc_ids: Sequence[str], texts: Iterable[str], dedup: Dedup) -> None:
    """Write a block's key file from its documents' SHA-256 (hex) and texts, in source order.

    No more than `_SIGNED` texts are in memory at once, unless `texts` itself holds more.
    """
    tables = {EXACT: exact_table(doc_ids)}
    if dedup.kind == "minhash":
        signer = Signer(dedup.ngram, dedup.permutations)
        shape = bands(dedup.permutations, dedup.jaccard)
        keys, features = [np.empty((0, shape[0]), np.uint64)], [sketches(signer.sign([]))]
        remaining = iter(texts)
        while batch := list(islice(remaining, _SIGNED)):
            signatures = signer.sign(batch)
            keys.append(band_keys(signatures, *shape))
            features.append(sketches(signatures))
        tables[NEAR] = KeyTable.build(np.concatenate(keys), np.concatenate(features))
    write_tables(path, tables)


def partitions_for(documents: int, dedup: Dedup) -> int:
    """Return the number of partitions for the keys of this many documents."""
    keys = 1 if dedup.kind == "exact" else 1 + bands(dedup.permutations, dedup.jaccard)[0]
    return min(SLOTS, max(1, -(-documents * keys // _PARTITION_ENTRIES)))


def match_partition(
    partition: int, *, partitions: int, key_files: Sequence[Path], dedup: Dedup, folder: Path
) -> Path:
    """Compare the documents that share a key in this part of the key space; write the edges.

    Returns:
        A file in `folder` with two arrays [edges, 2] of document numbers, `exact` and `near`: each
        edge is a duplicate and the document that it repeats.
    """
    low, high = (part * SLOTS // partitions for part in (partition, partition + 1))
    edges = {EXACT: _match(key_files, EXACT, low, high, _equal), NEAR: _no_edges()}
    if dedup.kind == "minhash":

        def same(left: Features, right: Features) -> npt.NDArray[np.bool_]:
            return similar(left, right, dedup.jaccard)

        edges[NEAR] = _match(key_files, NEAR, low, high, same)
    path = folder / f"edges-{partition:05d}.safetensors"
    write_arrays(path, edges)
    return path


def find_duplicates(edge_files: Sequence[Path]) -> Duplicates:
    """Return the documents to drop, from all edges that `match_partition` wrote."""
    exact, folded, count = [np.empty(0, np.int64)], _no_edges(), 0
    waiting: list[Indices] = []
    for path in edge_files:
        # Copy the arrays, because views would keep their file open.
        edges = {name: np.array(found) for name, found in read_arrays(path).items()}
        exact.append(edges[EXACT][:, 0])
        waiting += edges.values()
        count += sum(map(len, edges.values()))
        if count > max(_FOLDED, len(folded)):
            folded, waiting, count = components(np.concatenate([folded, *waiting])), [], 0
    folded = components(np.concatenate([folded, *waiting]))
    repeats = np.isin(folded[:, 0], np.concatenate(exact))
    return Duplicates(folded[:, 0], folded[:, 1], repeats)


def _match(key_files: Sequence[Path], table: str, low: int, high: int, same: Same) -> Indices:
    """Return edges [edges, 2], duplicate and first, of documents with a key in these slots.

    A bucket of more than _RUN documents is matched run by run. Documents without an edge meet in
    another round, as long as each round halves the bucket. So a page copied a million times is
    found at linear cost, and a million pages that share only a band cost no more.
    """
    block_starts, keys, numbers = _read_entries(key_files, table, low, high)
    numbers, bucket = _buckets(keys, numbers)
    edges = [_no_edges()]
    while len(numbers):
        heads = np.flatnonzero(np.diff(bucket, prepend=-1))
        sizes = np.diff(np.append(heads, len(numbers)))
        starts = np.flatnonzero((np.arange(len(numbers)) - np.repeat(heads, sizes)) % _RUN == 0)
        linked = np.zeros(len(numbers), np.int64)
        for first, members, runs in _chunks(numbers, starts):
            documents, index = np.unique(members, return_inverse=True)
            features = _read_features(key_files, table, block_starts, documents)
            found = link(features, index, runs, same)
            edges.append(members[found])
            linked[first + found[:, 0]] = 1
        again = (sizes > _RUN) & (2 * np.add.reduceat(linked, heads) >= sizes)
        left = np.repeat(again, sizes) & (linked == 0)
        numbers, bucket = numbers[left], bucket[left]
    return components(np.concatenate(edges))


def _read_entries(
    key_files: Sequence[Path], table: str, low: int, high: int
) -> tuple[Indices, U64, Indices]:
    """Return each block's first number, the keys in these slots, and their documents' numbers."""
    firsts, keys, numbers = [0], [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for path in key_files:
        block = read_table(path, table)
        found, rows = block.between(low, high)
        keys.append(found)
        numbers.append(rows + firsts[-1])
        firsts.append(firsts[-1] + len(block.features))
    return np.array(firsts), np.concatenate(keys), np.concatenate(numbers)


def _buckets(keys: U64, numbers: Indices) -> tuple[Indices, Indices]:
    """Return documents that share a key with another one, and the bucket of each, by bucket.

    The place of each key replaces its last bits, so that numpy can sort ten times as fast as with
    argsort; the few keys whose first bits agree are then sorted by the whole key.
    """
    bits = np.uint64(len(keys).bit_length())
    packed = np.sort((keys >> bits << bits) | np.arange(len(keys), dtype=np.uint64))
    places = packed & ((np.uint64(1) << bits) - np.uint64(1))
    places = places[_repeated(packed >> bits)]  # ascending for equal keys, and so are the numbers
    places = places[np.argsort(keys[places], kind="stable")]
    places = places[_repeated(keys[places])]
    keys = keys[places]
    return numbers[places], np.cumsum(np.append(True, keys[1:] != keys[:-1])[: len(keys)])


def _repeated(ordered: U64) -> npt.NDArray[np.bool_]:
    """Return which values are next to an equal value."""
    equal = np.zeros(len(ordered) + 1, bool)
    equal[1:-1] = ordered[1:] == ordered[:-1]
    return equal[1:] | equal[:-1]


def _chunks(numbers: Indices, starts: Indices) -> Iterator[tuple[int, Indices, Indices]]:
    """Yield groups of runs to compare at once: the first member's place, members, run starts."""
    ends = np.append(starts[1:], len(numbers))
    run = 0
    while run < len(starts):
        first = int(starts[run])
        stop = int(np.searchsorted(ends, first + _COMPARED, side="right"))
        yield first, numbers[first : ends[stop - 1]], starts[run:stop] - first
        run = stop


def _read_features(
    key_files: Sequence[Path], table: str, block_starts: Indices, documents: Indices
) -> Features:
    """Return the features of documents in ascending order, opening each block's file once."""
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


KEYS_FILE = "keys.safetensors"  # in a block's folder
_DUPLICATES_FILE = "duplicates.safetensors"


def match(
    partition: int, folder: Path, *, partitions: int, blocks: Sequence[Path], dedup: Dedup
) -> str:
    """Compare the documents of all blocks whose keys fall into a partition.

    Returns:
        The name of the file with the edges.
    """
    key_files = [block / KEYS_FILE for block in blocks]
    return match_partition(
        partition, partitions=partitions, key_files=key_files, dedup=dedup, folder=folder
    ).name


def join(edge_files: Sequence[Path], folder: Path) -> int:
    """Write the numbers, over all blocks, of the documents to drop.

    Returns:
        The number of documents to drop.
    """
    found = find_duplicates(edge_files)
    arrays = {"numbers": found.numbers, "firsts": found.firsts, "exact": found.exact.view("u1")}
    write_arrays(folder / _DUPLICATES_FILE, arrays)
    return len(found.numbers)


def read_duplicates(folder: Path) -> Duplicates:
    """Return the duplicates that `join` wrote in a folder, memory-mapped."""
    arrays = read_arrays(folder / _DUPLICATES_FILE)
    return Duplicates(arrays["numbers"], arrays["firsts"], arrays["exact"].view(bool))


def reasons(duplicates: Duplicates, first: int, documents: int) -> dict[int, str]:
    """Return each dropped row's reason, of `documents` documents from the number `first` on."""
    rows, exact = duplicates.in_block(first, documents)
    return {
        row: DUPLICATE if is_exact else NEAR_DUPLICATE
        for row, is_exact in zip(rows.tolist(), exact.tolist(), strict=True)
    }
