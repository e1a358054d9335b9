"""Where in a file of a checkpoint a tensor's bytes lie.

`torch.distributed.checkpoint` writes each tensor as `torch.save` does: a zip archive, of which
`data.pkl` tells shape and type, and `data/0` is the bytes as they are, not compressed.
"""

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import torch

# Of a file in a zip archive: 26 bytes, then the lengths of its name and of further fields.
_LOCAL_HEADER = struct.Struct("<26xHH")

# The class that stands for each type in `torch.save`'s format.
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


class DamagedError(Exception):
    """A record is not what was written."""


class StoredTensor(NamedTuple):
    """A contiguous tensor in a file."""

    file: str  # relative to the checkpoint
    offset: int  # of its first byte
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int  # CRC-32 of its bytes


# Bytes of a file from an offset on, so many; fewer where the file ends.
ReadAt = Callable[[int, int], bytes]


def stored_tensor(file: str, read_at: ReadAt, offset: int, length: int) -> StoredTensor | None:
    """The tensor whose record is `length` bytes at `offset`; None where it is no plain tensor.

    Raises:
        DamagedError: the record is none, or is cut off.
    """
    record = _Record(read_at, offset, length)
    try:
        archive = ZipFile(record)
        folder = archive.namelist()[0].partition("/")[0]
        header = io.BytesIO(archive.read(f"{folder}/data.pkl"))
        data = archive.getinfo(f"{folder}/data/0")
        record.seek(data.header_offset)
        local = record.read(_LOCAL_HEADER.size)
        start = data.header_offset + len(local) + sum(_LOCAL_HEADER.unpack(local))
        shape, dtype = _Header(header).load()
    except pickle.UnpicklingError:
        return None
    except (BadZipFile, KeyError, IndexError, EOFError, struct.error, ValueError) as error:
        raise DamagedError from error
    return StoredTensor(file, offset + start, shape, dtype, data.CRC)


class _Record(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, read_at: Callable[[int, int], bytes], offset: int, length: int) -> None:
        self._read_at = read_at
        self._offset = offset
        self._length = length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = (0, self._at, self._length)[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._length - self._at)
        wanted = left if size < 0 else min(size, left)
        content = self._read_at(self._offset + self._at, wanted) if wanted else b""
        self._at += len(content)
        return content


class _Header(pickle.Unpickler):
    """Shape and type of a contiguous tensor, from the pickle that `torch.save` writes of it.

    Nothing in it is run: any name but those of a plain tensor is refused.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Stand-ins for what a plain tensor is made of."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _shape_and_dtype
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name} is not of a plain tensor")

    def persistent_load(self, pid: Any) -> torch.dtype:
        """The type of a storage: ("storage", its class, key, location, elements)."""
        dtype: torch.dtype = pid[1]
        return dtype


def _shape_and_dtype(
    dtype: torch.dtype, start: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> tuple[tuple[int, ...], torch.dtype]:
    contiguous = torch.empty(shape, device="meta").stride()
    if start or strides != contiguous:
        raise pickle.UnpicklingError("not contiguous")
    return shape, dtype
