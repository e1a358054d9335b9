"""Checkpoints of `torch.distributed.checkpoint`, each tensor read straight into its place.

PyTorch's own reader unpickles every tensor on the CPU and copies it from there. This one learns
from the same file where a tensor's bytes lie, and has a `Reader` bring them to the device.
"""

import io
import math
import pickle
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from pipelines.core.errors import UserError
from pipelines.loading.choice import open_for_bulk
from pipelines.loading.readers import Reader, Wait, read_whole

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


class _Stored(NamedTuple):
    """A contiguous tensor in a file."""

    path: Path
    offset: int  # of its first byte
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Begun(NamedTuple):
    """A tensor on its way: once `wait` returned, `part` is what `target` is to hold."""

    item: ReadItem
    target: Tensor
    part: Tensor
    wait: Wait


class CheckpointReader(FileSystemReader):
    """Reads what `FileSystemWriter` wrote, for any layout, to the bit as `FileSystemReader`."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors; what isn't plain tensors is left to PyTorch."""
        plain: list[tuple[ReadItem, _Stored]] = []
        others: list[ReadItem] = []
        for item in plan.items:
            if (stored := self._find(item)) is None:
                others.append(item)
            else:
                plain.append((item, stored))
        for begun in self._read_ahead(plain, planner):
            begun.wait()
            if begun.part is not begun.target:
                begun.target.copy_(begun.part)
            planner.commit_tensor(begun.item, begun.target)
        return super().read_data(LoadPlan(others), planner)

    def _find(self, item: ReadItem) -> _Stored | None:
        """Where the tensor lies that an item is a part of."""
        info = self.storage_data[item.storage_index]
        if item.type is not LoadItemType.TENSOR or info.transform_descriptors:
            return None
        path = Path(self.path) / info.relative_path
        with path.open("rb") as file:
            try:
                archive: Any = torch._C.PyTorchFileReader(self._slice_file(file, info))
                header = io.BytesIO(archive.get_record("data.pkl"))
                offset = info.offset + archive.get_record_offset("data/0")
            except RuntimeError as error:
                name = item.storage_index.fqn
                raise UserError(f"{path}: {name} is damaged or the file truncated") from error
        try:
            shape, dtype = _Header(header).load()
        except pickle.UnpicklingError:
            return None
        return _Stored(path, offset, shape, dtype)

    def _read_ahead(
        self, plain: list[tuple[ReadItem, _Stored]], planner: LoadPlanner
    ) -> Iterator[_Begun]:
        paths = sorted({stored.path for _, stored in plain})
        readers: dict[torch.device, Reader] = {}
        begun: deque[_Begun] = deque()
        for item, stored in plain:
            target = planner.resolve_tensor(item).detach()
            if target.device not in readers:
                readers[target.device] = open_for_bulk(paths, target.device)
            reader = readers[target.device]
            begun.append(_begin(item, stored, target, reader, paths.index(stored.path)))
            if len(begun) > reader.ahead:
                yield begun.popleft()
        yield from begun


def _begin(item: ReadItem, stored: _Stored, target: Tensor, reader: Reader, file: int) -> _Begun:
    """Begin to read the rows that an item wants, or all where it wants parts of rows."""
    if target.shape != item.lengths:
        raise ValueError(f"{item.storage_index}: {target.shape}, but {item.lengths} are stored")
    starts, shape, offset = list(item.storage_offsets), list(stored.shape), stored.offset
    if shape:
        row = stored.dtype.itemsize * math.prod(shape[1:])
        offset += starts[0] * row
        starts[0], shape[0] = 0, item.lengths[0]
    is_whole = shape == list(item.lengths)
    if is_whole and target.is_contiguous() and target.dtype == stored.dtype:
        return _Begun(item, target, target, read_whole(reader, file, offset, target))
    rows = torch.empty(shape, dtype=stored.dtype, device=target.device)
    part = rows
    for dim, (start, length) in enumerate(zip(starts, item.lengths, strict=True)):
        part = part.narrow(dim, start, length)
    return _Begun(item, target, part, read_whole(reader, file, offset, rows))


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
