"""A block's key file: the data for matching its documents, laid out for reads of key ranges.

The key space has 65,536 slots, by a key's first 16 bits; a range is a number of slots.

There are two tables, `exact` (by the hash of the text) and `near` (by the bands of a MinHash
signature), each with three arrays:

    keys      uint64 [entries]          sorted by slot; documents with equal keys are compared
    rows      uint32 [entries]          the document's row in its block; ascending within a slot
    features  uint8 [documents, bytes]  compared values: 16 bytes of the hash, or a MinHash sketch

The file has the safetensors format, which many tools read; it appears whole or not at all.
"""

import json
import mmap
import os
import tempfile
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

EXACT = "exact"
NEAR = "near"
ID_BYTES = 16  # of a SHA-256: no two of 10^15 texts share them by chance

SLOTS = 1 << 16
_SLOT_BITS = 16
_DTYPES = {"U64": "<u8", "I64": "<i8", "U32": "<u4", "U8": "u1"}


@dataclass(frozen=True)
class KeyTable:
    """One table of a block's key file, as the module docstring describes it."""

    keys: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint32]
    features: npt.NDArray[np.uint8]

    @classmethod
    def build(cls, keys: npt.NDArray[np.uint64], features: npt.NDArray[np.uint8]) -> Self:
        """Make a table from the keys of the documents, [documents, keys a document]."""
        slots = (keys >> np.uint64(64 - _SLOT_BITS)).astype(np.uint16)
        order = np.argsort(slots, axis=None, kind="stable")  # 16-bit slots use a radix sort
        rows = order // max(keys.shape[1], 1)
        return cls(keys.ravel()[order], rows.astype(np.uint32), features)

    def between(self, low: int, high: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return the keys and rows of the entries in the slots from `low` up to `high` - 1."""
        start, stop = (bisect_left(self.keys, slot, key=_slot) for slot in (low, high))
        return np.array(self.keys[start:stop]), self.rows[start:stop].astype(np.int64)


def _slot(key: np.uint64) -> int:
    return int(key) >> (64 - _SLOT_BITS)


def exact_table(doc_ids: Sequence[str]) -> KeyTable:
    """Make the exact table: 8 bytes of a SHA-256 find candidates, 16 bytes decide."""
    ids = np.frombuffer(bytes.fromhex("".join(i[: 2 * ID_BYTES] for i in doc_ids)), np.uint8)
    features = ids.reshape(-1, ID_BYTES)
    return KeyTable.build(features.view("<u8")[:, :1], features)


def write_tables(path: Path, tables: Mapping[str, KeyTable]) -> None:
    """Write a block's key file."""
    write_arrays(
        path,
        {
            f"{name}.{part}": getattr(table, part)
            for name, table in tables.items()
            for part in ("keys", "rows", "features")
        },
    )


def read_table(path: Path, name: str) -> KeyTable:
    """Return one table of a key file, memory-mapped: only the parts that are used are read."""
    arrays = read_arrays(path)
    return KeyTable(*(arrays[f"{name}.{part}"] for part in ("keys", "rows", "features")))


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write named arrays so that a reader sees either all of them or no file."""
    from safetensors.numpy import save_file

    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Memory-map the arrays that `write_arrays` wrote, without the copies that safetensors makes.

    A safetensors file has the header's size in 8 bytes, the header as JSON, then the arrays.
    """
    with path.open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    start = 8 + int(mapped[:8].view("<u8")[0])
    header = json.loads(mapped[8:start].tobytes())
    return {
        name: mapped[start + first : start + end]
        .view(_DTYPES[found["dtype"]])
        .reshape(found["shape"])
        for name, found in header.items()
        for first, end in [found["data_offsets"]]
    }
