"""A block's key file: what matching needs of its documents, laid out for reads of a range of keys.

Two tables, `exact` (by the hash of the text) and `near` (by the bands of a MinHash signature), each
of three arrays:

    keys      uint64 [entries]          sorted; equal keys make two documents worth a comparison
    rows      uint32 [entries]          of the document in its block; ascending where keys are equal
    features  uint8 [documents, bytes]  what is compared: 16 bytes of the hash, or a MinHash sketch

The file is in the safetensors format, so anything reads it; it appears whole or not at all.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

EXACT = "exact"
NEAR = "near"
ID_BYTES = 16  # of SHA-256: no two of 10^15 texts share them by chance

_DTYPES = {"U64": "<u8", "I64": "<i8", "U32": "<u4", "U8": "u1"}


@dataclass(frozen=True)
class KeyTable:
    """One way in which a block's documents are matched; see above."""

    keys: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint32]
    features: npt.NDArray[np.uint8]

    @classmethod
    def build(cls, keys: npt.NDArray[np.uint64], features: npt.NDArray[np.uint8]) -> Self:
        """From the keys of each document, [documents, keys a document]."""
        order = np.argsort(keys, axis=None, kind="stable")
        rows = order // max(keys.shape[1], 1)
        return cls(keys.ravel()[order], rows.astype(np.uint32), features)

    def between(self, low: int, high: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Keys and rows of the entries with low <= key < high."""
        start = int(np.searchsorted(self.keys, np.uint64(low)))
        stop = int(np.searchsorted(self.keys, np.uint64(high - 1), side="right"))
        return np.array(self.keys[start:stop]), self.rows[start:stop].astype(np.int64)


def exact_table(doc_ids: Sequence[str]) -> KeyTable:
    """From the hex SHA-256 of each text: its first 8 bytes find, its first 16 decide."""
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
    """One table of a key file, memory-mapped: what is not touched is not read."""
    arrays = read_arrays(path)
    return KeyTable(*(arrays[f"{name}.{part}"] for part in ("keys", "rows", "features")))


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write named arrays so that a reader sees all of them or no file."""
    from safetensors.numpy import save

    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Map the arrays of a file that `write_arrays` wrote; copies nothing, which safetensors would.

    A safetensors file is the header's size in 8 bytes, the header as JSON, then the arrays.
    """
    mapped = np.memmap(path, np.uint8, "r")
    start = 8 + int(mapped[:8].view("<u8")[0])
    header = json.loads(mapped[8:start].tobytes())
    return {
        name: mapped[start + first : start + end]
        .view(_DTYPES[found["dtype"]])
        .reshape(found["shape"])
        for name, found in header.items()
        for first, end in [found["data_offsets"]]
    }
