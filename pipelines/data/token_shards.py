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

Here a document is one sequence, so S = D. The layout is that of
`megatron/core/datasets/indexed_dataset.py`; NeMo and datatrove read it too.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
SMALL_VOCABULARY = 65500  # Megatron's limit for uint16
_HEADER = struct.Struct("<9sQBQQ")

Ids = npt.NDArray[np.integer[Any]]  # uint16 or int32


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that a vocabulary's ids are stored as: uint16 or int32, little-endian."""
    return DTYPES[8 if vocab_size < SMALL_VOCABULARY else 4]


def bin_path(prefix: Path) -> Path:
    """The token file of a shard; a dot in the prefix's name is kept."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """The index file of a shard."""
    return prefix.with_name(prefix.name + ".idx")


class ShardWriter:
    """Writes one shard; it is whole once `close` has written the index."""

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.prefix = prefix
        self._dtype = token_dtype(vocab_size)
        self._sizes: list[int] = []
        self._file = bin_path(prefix).open("wb")
        self.tokens = 0

    def add(self, ids: Ids) -> None:
        """Append one document's token ids, shape [tokens], its end-of-document token included."""
        self._file.write(ids.astype(self._dtype, copy=False).tobytes())
        self._sizes.append(len(ids))
        self.tokens += len(ids)

    def close(self) -> None:
        """Write the index."""
        self._file.close()
        sizes = np.array(self._sizes, dtype="<i4")
        ends = np.cumsum(sizes, dtype=np.int64) * self._dtype.itemsize
        pointers = np.concatenate([np.zeros(1, np.int64), ends])[: len(sizes)].astype("<i8")
        documents = np.arange(len(sizes) + 1, dtype="<i8")
        code = next(code for code, dtype in DTYPES.items() if dtype == self._dtype)
        with idx_path(self.prefix).open("wb") as file:
            file.write(_HEADER.pack(MAGIC, VERSION, code, len(sizes), len(documents)))
            for part in (sizes, pointers, documents):
                file.write(part.tobytes())


class RollingShardWriter:
    """Writes `<name>-00000`, `<name>-00001`, …: a new shard before one exceeds `shard_tokens`.

    A document never spans two shards; one longer than `shard_tokens` has a shard to itself.
    """

    def __init__(self, folder: Path, name: str, vocab_size: int, shard_tokens: int) -> None:
        self._folder = folder
        self._name = name
        self._vocab_size = vocab_size
        self._shard_tokens = shard_tokens
        self._shard: ShardWriter | None = None
        self.tokens: dict[Path, int] = {}  # of each closed shard, by its prefix

    def add(self, ids: Ids) -> None:
        """Append one document, as `ShardWriter.add`."""
        if self._shard and self._shard.tokens + len(ids) > self._shard_tokens:
            self.close()
        if self._shard is None:
            prefix = self._folder / f"{self._name}-{len(self.tokens):05d}"
            self._shard = ShardWriter(prefix, self._vocab_size)
        self._shard.add(ids)

    def close(self) -> None:
        """Close the open shard; `tokens` then names every shard."""
        if self._shard is not None:
            self._shard.close()
            self.tokens[self._shard.prefix] = self._shard.tokens
            self._shard = None


class ShardIndex:
    """What the `.idx` of a shard says; only its header is read at once.

    Attributes:
        dtype: of a token id.
        sequences: how many there are.

    Raises:
        ValueError: not an index of this format.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            raw = file.read(_HEADER.size)
        if len(raw) < _HEADER.size:
            raise ValueError(f"{path}: too short for a Megatron index")
        magic, version, code, self.sequences, self._documents = _HEADER.unpack(raw)
        if magic != MAGIC or version != VERSION or code not in DTYPES:
            raise ValueError(
                f"{path}: not a Megatron index of version {VERSION} with dtype "
                f"{sorted(DTYPES)} (magic {magic!r}, version {version}, dtype {code})"
            )
        self.dtype = DTYPES[code]
        self._path = path

    def pointers(self) -> npt.NDArray[np.int64]:
        """Where each sequence begins in `.bin`, in bytes, int64 [sequences]; a memory map."""
        if not self.sequences:  # an empty map is refused
            return np.zeros(0, np.int64)
        behind = _HEADER.size + 4 * self.sequences
        return np.memmap(self._path, "<i8", "r", behind, self.sequences)

    def document_offsets(self) -> npt.NDArray[np.int64]:
        """Where documents begin and the last ends, in tokens, int64 [documents + 1]."""
        sizes = np.fromfile(self._path, "<i4", self.sequences, offset=_HEADER.size)
        # The pointers only repeat the sizes' sums: sequences lie one after the other.
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
        behind = _HEADER.size + 12 * self.sequences
        return offsets[np.fromfile(self._path, "<i8", self._documents, offset=behind)]


class IndexedDataset:
    """A shard, read through memory maps.

    Attributes:
        tokens: every id of the shard, shape [tokens], uint16 or int32.
        document_offsets: as of `ShardIndex`.

    Raises:
        ValueError: not an index of this format, or `.bin` is not as long as the index says.
    """

    def __init__(self, prefix: Path) -> None:
        index = ShardIndex(idx_path(prefix))
        self.document_offsets = index.document_offsets()
        tokens = int(self.document_offsets[-1])
        self.tokens: Ids = _map_tokens(bin_path(prefix), index.dtype, tokens)

    def __len__(self) -> int:
        """Documents in the shard."""
        return len(self.document_offsets) - 1

    def document(self, index: int) -> Ids:
        """One document's ids, its end-of-document token included."""
        start, stop = self.document_offsets[index : index + 2]
        return self.tokens[start:stop]


def _map_tokens(path: Path, dtype: np.dtype[Any], tokens: int) -> Ids:
    size = path.stat().st_size
    if size != tokens * dtype.itemsize:
        raise ValueError(f"{path}: {size} bytes, but its index counts {tokens} tokens")
    if not tokens:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
