"""safetensors files by byte ranges: read directly to a device, or written a tensor at a time.

A file holds the length of its header, as 8 bytes little-endian; the header, which is JSON and gives
each tensor's type, shape and place by name; and the tensors' bytes, one after the other.
"""

import json
import math
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipelines.core.errors import UserError, one_line
from pipelines.loading.sources.gpu_readers import open_for_bulk
from pipelines.loading.sources.readers import Wait, read_whole

_LONGEST_HEADER = 100_000_000  # the format's own limit
_LARGEST = 1 << 40  # more than a file or a dimension has
_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PAGE = 4096  # bytes; tensors that begin at a page's start can be mapped into memory


class TensorPlace(NamedTuple):
    """Where a tensor lies in the files, its shape and its type."""

    file: int  # index of its file
    offset: int  # position of its first byte
    shape: tuple[int, ...]
    dtype: torch.dtype


class Rows(NamedTuple):
    """Consecutive rows of a tensor, from `first` to before `stop`."""

    first: int
    stop: int


class SafetensorsFiles:
    """The tensors of one or several files.

    Attributes:
        places: The place of each tensor, by its name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read only the headers.

        Raises:
            UserError: a file is not in safetensors format, or its size contradicts its header.
        """
        self._paths = paths
        self.places: dict[str, TensorPlace] = {}
        for number, path in enumerate(paths):
            try:
                self.places |= _read_header(path, number)
            except _BROKEN as error:
                raise UserError(f"{path}: the weights can't be read: {one_line(error)}") from error

    def read(
        self,
        device: torch.device,
        names: Collection[str] | None = None,
        into: Mapping[str, Tensor] = MappingProxyType({}),
        rows: Mapping[str, Rows] = MappingProxyType({}),
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors in the order of the files, while the next ones are already being read.

        Args:
            device: The device to read to.
            names: The wanted tensors; all by default.
            into: Destinations by name; each is used if its type and layout are the file's.
            rows: The wanted rows, of tensors of which not all are wanted.
        """
        reader = open_for_bulk(self._paths, device)
        wanted = self.places if names is None else {name: self.places[name] for name in names}
        begun: deque[tuple[str, Tensor, Wait]] = deque()
        for name, whole in sorted(wanted.items(), key=lambda each: each[1][:2]):
            place = whole if name not in rows else _of_rows(whole, rows[name])
            tensor = into.get(name)
            if tensor is None or tensor.dtype != place.dtype or not tensor.is_contiguous():
                tensor = torch.empty(place.shape, dtype=place.dtype, device=device)
            wait = read_whole(reader, place.file, place.offset, tensor)
            begun.append((name, tensor, wait))
            if len(begun) > reader.ahead:
                yield _finish(begun)
        while begun:
            yield _finish(begun)


def _of_rows(whole: TensorPlace, rows: Rows) -> TensorPlace:
    row_bytes = math.prod(whole.shape[1:]) * whole.dtype.itemsize
    shape = (rows.stop - rows.first, *whole.shape[1:])
    return whole._replace(offset=whole.offset + rows.first * row_bytes, shape=shape)


def weight_bytes(paths: Sequence[Path]) -> int:
    """Return the size of all tensors in bytes; raise UserError as `SafetensorsFiles` does."""
    places = SafetensorsFiles(paths).places.values()
    return sum(math.prod(place.shape) * place.dtype.itemsize for place in places)


def header_bytes(path: Path) -> int:
    """Return the length of a file's header."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(8), "little")


def write_one_by_one(
    path: Path, tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str], room: int
) -> dict[str, int]:
    """Write a file of which memory holds one tensor at a time.

    A header comes first, and is known last: it gets space in front, and blanks fill what it leaves.

    Args:
        path: The file; one that is there already keeps its space and gets new content.
        tensors: Names and tensors, on the CPU, in the order of the file.
        metadata: Further text for the header, by name.
        room: The most bytes that the header needs beside its metadata.

    Returns:
        The tensors' bytes by name.

    Raises:
        ValueError: The header needs more.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = -(-(8 + len(_as_json(header)) + room) // _PAGE) * _PAGE
    written: dict[str, int] = {}
    end = 0
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        file.seek(start)
        for name, tensor in tensors:
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            written[name] = tensor.nbytes
            place = [end, end := end + tensor.nbytes]
            entry = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": place}
            header[name] = entry
        text = _as_json(header)
        if len(text) > start - 8:
            raise ValueError(f"{path}: the header has {len(text)} bytes, more than {start - 8}")
        file.seek(0)
        file.write((start - 8).to_bytes(8, "little") + text.ljust(start - 8))
        file.truncate(start + end)
    return written


def _as_json(header: Mapping[str, Any]) -> bytes:
    """Return the same bytes for the same content."""
    text = json.dumps(header, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return text.encode()


def _finish(begun: deque[tuple[str, Tensor, Wait]]) -> tuple[str, Tensor]:
    name, tensor, wait = begun.popleft()
    wait()
    return name, tensor


def _read_header(path: Path, number: int) -> dict[str, TensorPlace]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
            raise ValueError(f"its header has {length} bytes, but the file has {size}")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    behind = 8 + length
    places = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        if not all(type(each) is int and 0 <= each < _LARGEST for each in (start, stop, *shape)):
            raise ValueError(f"{name} has the shape {shape} at {start} to {stop}")
        if start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} is {entry}, but the tensor before it ends at {end}")
        places[name] = TensorPlace(number, behind + start, shape, dtype)
        end = stop
    if behind + end != size:
        raise ValueError(f"the file has {size} bytes, but its header says {behind + end}")
    return places
