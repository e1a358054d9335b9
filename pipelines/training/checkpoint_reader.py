"""Checkpoints of `torch.distributed.checkpoint`, each tensor read straight into its place.

PyTorch's own reader unpickles every tensor on the CPU and copies it from there. This one learns
from the same file where a tensor's bytes lie, and has a `Reader` bring them to the device.
"""

import io
import math
import pickle
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from pipelines.core.errors import UserError
from pipelines.loading.choice import open_for_bulk
from pipelines.loading.object_ranges import NamedObject, ObjectReader
from pipelines.loading.readers import Reader, Wait, read_whole
from pipelines.loading.remote import CONNECTIONS, S3Objects
from pipelines.training.checkpoint_store import FSSPEC_OPTIONS

_MEND = "delete the checkpoint, and the run goes on from the one before it"
_HEADER = 16 << 10  # bytes asked for at a time where headers are read from S3

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

    file: str  # relative to the checkpoint
    offset: int  # of its first byte
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Begun(NamedTuple):
    """A tensor on its way: once `wait` returned, `part` is what `target` is to hold."""

    item: ReadItem
    target: Tensor
    part: Tensor
    wait: Wait


class CheckpointReader(FsspecReader):
    """Reads what `CheckpointWriter` wrote, for any layout, to the bit as `FsspecReader`."""

    def __init__(self, url: str | Path) -> None:
        """Of a folder, or of a prefix in S3."""
        self._url = str(url)
        self._is_remote = "://" in self._url
        super().__init__(self._url, **FSSPEC_OPTIONS)
        self._files, _ = url_to_fs(self._url, **FSSPEC_OPTIONS)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors; what isn't plain tensors is left to PyTorch."""
        with ThreadPoolExecutor(CONNECTIONS if self._is_remote else 1) as pool:
            found = list(zip(plan.items, pool.map(self._find, plan.items), strict=True))
        plain = [(item, stored) for item, stored in found if stored is not None]
        for begun in self._read_ahead(plain, planner):
            begun.wait()
            if begun.part is not begun.target:
                begun.target.copy_(begun.part)
            planner.commit_tensor(begun.item, begun.target)
        return super().read_data(LoadPlan([item for item, stored in found if not stored]), planner)

    def _find(self, item: ReadItem) -> _Stored | None:
        """Where the tensor lies that an item is a part of."""
        info = self.storage_data[item.storage_index]
        if item.type is not LoadItemType.TENSOR or info.transform_descriptors:
            return None
        where, name = f"{self._url}/{info.relative_path}", item.storage_index.fqn
        # Only the ends of a tensor's record are read here.
        small = {"block_size": _HEADER, "cache_type": "blockcache"} if self._is_remote else {}
        try:
            with self._files.open(where, "rb", **small) as file:
                archive: Any = torch._C.PyTorchFileReader(self._slice_file(file, info))
                header = io.BytesIO(archive.get_record("data.pkl"))
                offset = info.offset + archive.get_record_offset("data/0")
        except FileNotFoundError as error:
            raise UserError(f"{where} is missing, and {name} with it; {_MEND}") from error
        except RuntimeError as error:
            raise UserError(f"{where}: {name} is damaged or the file truncated; {_MEND}") from error
        try:
            shape, dtype = _Header(header).load()
        except pickle.UnpicklingError:
            return None
        return _Stored(info.relative_path, offset, shape, dtype)

    def _read_ahead(
        self, plain: list[tuple[ReadItem, _Stored]], planner: LoadPlanner
    ) -> Iterator[_Begun]:
        files = sorted({stored.file for _, stored in plain})
        readers: dict[torch.device, Reader] = {}
        begun: deque[_Begun] = deque()
        for item, stored in plain:
            target = planner.resolve_tensor(item).detach()
            if target.device not in readers:
                readers[target.device] = self._open(files, target.device)
            reader = readers[target.device]
            begun.append(_begin(item, stored, target, reader, files.index(stored.file)))
            if len(begun) > reader.ahead:
                yield begun.popleft()
        yield from begun

    def _open(self, files: list[str], device: torch.device) -> Reader:
        if self._is_remote:
            objects = [NamedObject(file, _MEND) for file in files]
            return ObjectReader(S3Objects(self._url), objects)
        return open_for_bulk([Path(self._url) / file for file in files], device)


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


class SameModelPlanner(DefaultLoadPlanner):
    """Refuses a checkpoint that holds other tensors than the processes together ask for."""

    metadata: Metadata

    def create_local_plan(self) -> LoadPlan:
        """What this process reads.

        Raises:
            UserError: a tensor is missing or has another shape.
        """
        stored = self.metadata.state_dict_metadata
        for name, tensor in self.state_dict.items():
            if name not in stored:
                raise _another_model(f"it has no {name}")
            found = stored[name]
            shape = tuple(found.size) if isinstance(found, TensorStorageMetadata) else None
            if shape != tuple(tensor.shape):
                raise _another_model(f"{name} is {shape} there, but {tuple(tensor.shape)} here")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On one process: a tensor that nobody reads is of a larger model, or of another one."""
        wanted = {item.storage_index.fqn for plan in global_plan for item in plan.items}
        if unknown := sorted(self.metadata.state_dict_metadata.keys() - wanted):
            raise _another_model(f"it also has {unknown[0]}")
        return super().create_global_plan(global_plan)


def _another_model(difference: str) -> UserError:
    return UserError(
        f"it is of another model or adapter: {difference}; set the recipe that it was made with, "
        "or begin anew elsewhere"
    )
