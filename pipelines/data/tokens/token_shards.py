"""Token shards: Megatron's indexed dataset, a `.bin` of token ids beside its `.idx`.

`.bin` holds little-endian ids, document after document, with no header. `.idx`, little-endian too:

    magic      9 bytes   MMIDIDX\\0\\0
    version    u64       1
    dtype      u8        8 = uint16, 4 = int32
    sequences  u64       S
    documents  u64       D + 1
    sizes      i32 [S]   tokens of each sequence
    pointers   i64 [S]   byte offset of each sequence in .bin
    documents  i64 [D+1] first sequence of each document, and S

A document of plain text is one sequence, so S = D; a packed sample is a document whose sequences
are the pieces in it. Sequences lie in `.bin` in their order, with nothing between them. The layout
is that of `megatron/core/datasets/indexed_dataset.py`; NeMo reads and datatrove writes it too.

Where some tokens are not to be predicted, a loss mask lies beside them, `.mask`: one byte a token,
1 where it is. Megatron does not know that file.

How long documents are in tokens: the histogram that a dataset version is compared by.
"""

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.core.errors import DamagedFileError
from pipelines.core.storage import readable
from pipelines.run.records import SPLITS, DatasetRef, Shard

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
SMALL_VOCABULARY = 65500  # Megatron's limit for uint16
_FIX = "run preprocess again"
_HEADER = struct.Struct("<9sQBQQ")

Ids = npt.NDArray[np.integer[Any]]  # uint16 or int32
Mask = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.integer[Any]]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type that a vocabulary's ids are stored as: uint16 or int32, little-endian."""
    return DTYPES[8 if vocab_size < SMALL_VOCABULARY else 4]


def bin_path(prefix: Path) -> Path:
    """Return the token file of a shard; a dot in the prefix's name is kept."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return the index file of a shard."""
    return prefix.with_name(prefix.name + ".idx")


def mask_path(prefix: Path) -> Path:
    """Return the loss mask of a shard, where it has one."""
    return prefix.with_name(prefix.name + ".mask")


def shard_prefix(bin_file: Path) -> Path:
    """Return the prefix that a shard's files have in common, from its token file: `bin_path`
    undone.
    """
    return bin_file.with_suffix("")


class ShardWriter:
    """Writes one shard; it is whole once `close` has written the index."""

    def __init__(self, prefix: Path, vocab_size: int, *, masked: bool = False) -> None:
        self._prefix = prefix
        self._dtype = token_dtype(vocab_size)
        self._tokens = _HashedFile(bin_path(prefix))
        self._mask = _HashedFile(mask_path(prefix)) if masked else None
        self._sizes: list[Counts] = []
        self._sequences: list[Counts] = []

    def add(
        self,
        ids: Ids,
        sizes: Counts | None = None,
        mask: Mask | None = None,
        sequences: Counts | None = None,
    ) -> None:
        """Append documents.

        Args:
            ids: of all of them, end to end, their end-of-document tokens included; [tokens].
            sizes: of each sequence, in tokens; None for a single one.
            mask: 1 for each token that is predicted, else 0; [tokens]. Of a masked shard only.
            sequences: that each document consists of, [documents]; None for one each.

        Raises:
            ValueError: the arguments don't fit each other or the shard.
        """
        sizes = np.array([len(ids)]) if sizes is None else sizes
        sequences = np.ones_like(sizes) if sequences is None else sequences
        if int(sizes.sum()) != len(ids) or int(sequences.sum()) != len(sizes):
            raise ValueError("sizes and sequences do not add up to the token ids")
        if (mask is None) != (self._mask is None) or (mask is not None and len(mask) != len(ids)):
            raise ValueError("a masked shard needs one byte of mask a token, another none")
        self._tokens.write(ids, self._dtype)
        if mask is not None and self._mask is not None:
            self._mask.write(mask, np.dtype(np.uint8))
        self._sizes.append(sizes)
        self._sequences.append(sequences)

    def close(self) -> Shard:
        """Write the index.

        Returns:
            The shard's record, whose path is the name of its token file.
        """
        sizes = np.concatenate([np.zeros(0, np.int64), *self._sizes]).astype("<i4")
        sequences = np.concatenate([np.zeros(0, np.int64), *self._sequences])
        starts = _offsets(sizes)[:-1] * self._dtype.itemsize
        documents = _offsets(sequences)
        md5, size = self._tokens.close()
        mask_md5 = self._mask.close()[0] if self._mask else None
        code = next(code for code, dtype in DTYPES.items() if dtype == self._dtype)
        header = _HEADER.pack(MAGIC, VERSION, code, len(sizes), len(documents))
        index = _HashedFile(idx_path(self._prefix))
        index.write(np.frombuffer(header, np.uint8), np.dtype(np.uint8))
        index.write(sizes, np.dtype("<i4"))
        index.write(starts, np.dtype("<i8"))
        index.write(documents, np.dtype("<i8"))
        return Shard(
            path=bin_path(self._prefix).name,
            md5=md5,
            index_md5=index.close()[0],
            mask_md5=mask_md5,
            bytes=size,
            tokens=size // self._dtype.itemsize,
        )


class _HashedFile:
    """A file of numbers whose MD5 is known when it is written: nothing is read back."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._md5 = hashlib.md5(usedforsecurity=False)

    def write(self, numbers: npt.NDArray[Any], dtype: np.dtype[Any]) -> None:
        data = np.ascontiguousarray(numbers, dtype).view(np.uint8).data
        self._md5.update(data)
        self._file.write(data)

    def close(self) -> tuple[str, int]:
        """Return the hex MD5 and the bytes."""
        size = self._file.tell()
        self._file.close()
        return self._md5.hexdigest(), size


def _offsets(sizes: Counts) -> npt.NDArray[np.int64]:
    """Return where each of several things that lie end to end begins, and the last ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


class ShardIndex:
    """What the `.idx` of a shard says; only its header is read at once.

    Attributes:
        dtype: of a token id.
        sequences: how many there are.

    Raises:
        DamagedFileError: not an index of this format, or not as long as it says.
    """

    def __init__(self, path: Path) -> None:
        with readable(path), path.open("rb") as file:
            raw = file.read(_HEADER.size)
            size = file.seek(0, 2)
        if len(raw) < _HEADER.size:
            raise DamagedFileError(f"{path}: too short for a Megatron index; {_FIX}")
        magic, version, code, self.sequences, self._documents = _HEADER.unpack(raw)
        if magic != MAGIC or version != VERSION or code not in DTYPES:
            raise DamagedFileError(
                f"{path}: not a Megatron index of version {VERSION} with dtype "
                f"{sorted(DTYPES)} (magic {magic!r}, version {version}, dtype {code}); {_FIX}"
            )
        stated = _HEADER.size + 12 * self.sequences + 8 * self._documents
        if size != stated or not self._documents:
            raise DamagedFileError(
                f"{path}: {size} bytes, but its header speaks of {stated}; {_FIX}"
            )
        self.dtype = DTYPES[code]
        self._path = path

    def pointers(self) -> npt.NDArray[np.int64]:
        """Map where each sequence begins in `.bin`, in bytes, int64 [sequences]."""
        if not self.sequences:  # an empty map is refused
            return np.zeros(0, np.int64)
        behind = _HEADER.size + 4 * self.sequences
        return np.memmap(self._path, "<i8", "r", behind, self.sequences)

    def sequence_offsets(self) -> npt.NDArray[np.int64]:
        """Return where sequences begin and the last ends, in tokens, int64 [sequences + 1]."""
        # The pointers only repeat the sizes' sums: sequences lie one after the other.
        return _offsets(np.fromfile(self._path, "<i4", self.sequences, offset=_HEADER.size))

    def document_offsets(self) -> npt.NDArray[np.int64]:
        """Return where documents begin and the last ends, in tokens, int64 [documents + 1].

        Raises:
            DamagedFileError: a document begins at a sequence that is not there.
        """
        behind = _HEADER.size + 12 * self.sequences
        first: Counts = np.fromfile(self._path, "<i8", self._documents, offset=behind)
        if first.min() < 0 or first.max() > self.sequences:
            raise DamagedFileError(
                f"{self._path}: a document begins beyond its {self.sequences} pieces; {_FIX}"
            )
        offsets: npt.NDArray[np.int64] = self.sequence_offsets()[first]
        return offsets


LENGTH_HISTOGRAM = "length_histogram"  # its key in a dataset's statistics


def document_lengths(folder: Path, dataset: DatasetRef) -> Iterator[npt.NDArray[np.int64]]:
    """Yield tokens of each document, end-of-document token included: [documents], a shard at a
    time.

    Of packed samples, each piece and each padding counts as one. Only the shards' indexes are read;
    they lie below `folder`, the output of preprocess.
    """
    for shard in (shard for name in SPLITS for shard in getattr(dataset, name).shards):
        index = ShardIndex(idx_path(shard_prefix(folder / shard.path)))
        yield np.diff(index.sequence_offsets())


def dataset_histogram(folder: Path, dataset: DatasetRef) -> list[int]:
    """`length_histogram` of all documents of both splits."""
    counts = np.zeros(64, np.int64)
    for lengths in document_lengths(folder, dataset):
        found = length_histogram(lengths)
        counts[: len(found)] += found
    return [int(count) for count in np.trim_zeros(counts, "b")]


def length_histogram(lengths: npt.ArrayLike) -> list[int]:
    """Return documents of 1, 2 to 3, 4 to 7, … tokens: entry k counts those of 2^k up to 2^(k+1) -
    1.
    """
    _, exponents = np.frexp(np.maximum(np.asarray(lengths, np.float64), 1))
    return [int(count) for count in np.bincount(exponents - 1)]
