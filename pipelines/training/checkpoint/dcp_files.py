"""Checkpoints of `torch.distributed.checkpoint`, each tensor read straight into its place.

PyTorch's own reader unpickles every tensor on the CPU and copies it from there. This one learns
from the same file where a tensor's bytes lie, and has a `Reader` bring them to the device. What
is read whole must have the checksum (CRC-32) that it was written with, which PyTorch's ignores.

Where in a file of a checkpoint a tensor's bytes lie.

`torch.distributed.checkpoint` writes each tensor as `torch.save` does: a zip archive, of which
`data.pkl` tells shape and type, and `data/0` is the bytes as they are, not compressed.

Whether a checkpoint is of the model that is to be restored.

Checkpoints of `torch.distributed.checkpoint`, written durably and marked last.
"""

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipelines.core.errors import UserError
from pipelines.loading.sources.gpu_readers import open_for_bulk
from pipelines.loading.sources.readers import Reader, Wait, read_whole
from pipelines.loading.sources.s3_objects import (
    CONNECTIONS,
    NamedObject,
    ObjectBlocks,
    ObjectReader,
    S3Objects,
)
from pipelines.training.checkpoint.store import FSSPEC_OPTIONS

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


_FIX = "delete the checkpoint, and the run goes on from the one before it"


class _Begun(NamedTuple):
    """A tensor on its way: once `wait` returned, `part` is what `target` is to hold."""

    item: ReadItem
    stored: StoredTensor
    target: Tensor
    rows: Tensor  # what is read
    part: Tensor  # of these
    wait: Wait


class CheckpointReader(FsspecReader):
    """Reads what `CheckpointWriter` wrote, for any layout, to the bit as `FsspecReader`."""

    def __init__(self, url: str | Path) -> None:
        """Read checkpoints of a folder, or of a prefix in S3."""
        self._url = str(url)
        super().__init__(self._url, **FSSPEC_OPTIONS)
        self._objects = S3Objects(self._url) if "://" in self._url else None
        self._read_at = ObjectBlocks(self._objects, _FIX).read if self._objects else self._read_file

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which tensors there are.

        Raises:
            UserError: it is missing or damaged.
        """
        try:
            return super().read_metadata(*args, **kwargs)
        except Exception as error:  # whatever a damaged pickle may do
            raise UserError(f"{self._url}/.metadata is damaged or missing; {_FIX}") from error

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors; what isn't plain tensors is left to PyTorch."""
        with ThreadPoolExecutor(CONNECTIONS if self._objects else 1) as pool:
            found = list(zip(plan.items, pool.map(self._find, plan.items), strict=True))
        plain = [(item, stored) for item, stored in found if stored is not None]
        for begun in self._read_ahead(plain, planner):
            begun.wait()
            self._check(begun)
            if begun.part is not begun.target:
                begun.target.copy_(begun.part)
            planner.commit_tensor(begun.item, begun.target)
        return super().read_data(LoadPlan([item for item, stored in found if not stored]), planner)

    def _find(self, item: ReadItem) -> StoredTensor | None:
        """Where the tensor lies that an item is a part of."""
        info = self.storage_data[item.storage_index]
        if item.type is not LoadItemType.TENSOR or info.transform_descriptors:
            return None
        file, name = info.relative_path, item.storage_index.fqn
        try:
            return stored_tensor(file, partial(self._read_at, file), info.offset, info.length)
        except FileNotFoundError as error:
            raise UserError(f"{self._url}/{file} is missing, and {name} with it; {_FIX}") from error
        except DamagedError as error:
            raise UserError(
                f"{self._url}/{file}: {name} is damaged or the file truncated; {_FIX}"
            ) from error

    def _read_file(self, name: str, offset: int, length: int) -> bytes:
        path = Path(self._url) / name
        if not path.is_file():
            raise UserError(f"{path} is not there; {_FIX}")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def _check(self, begun: _Begun) -> None:
        """Compare the checksum of a tensor that was read whole."""
        stored = begun.stored
        if begun.rows.shape != stored.shape:
            return
        content = begun.rows.reshape(-1).view(torch.uint8).cpu().numpy().data
        if zlib.crc32(content) != stored.checksum:
            name = begun.item.storage_index.fqn
            raise UserError(f"{self._url}/{stored.file}: {name} is damaged; {_FIX}")

    def _read_ahead(
        self, plain: list[tuple[ReadItem, StoredTensor]], planner: LoadPlanner
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
        if self._objects is not None:
            objects = [NamedObject(file, _FIX) for file in files]
            return ObjectReader(self._objects, objects)
        return open_for_bulk([Path(self._url) / file for file in files], device)


def _begin(
    item: ReadItem, stored: StoredTensor, target: Tensor, reader: Reader, file: int
) -> _Begun:
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
        wait = read_whole(reader, file, offset, target)
        return _Begun(item, stored, target, target, target, wait)
    rows = torch.empty(shape, dtype=stored.dtype, device=target.device)
    part = rows
    for dim, (start, length) in enumerate(zip(starts, item.lengths, strict=True)):
        part = part.narrow(dim, start, length)
    return _Begun(item, stored, target, rows, part, read_whole(reader, file, offset, rows))


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
        """Check on one process: a tensor that nobody reads belongs to a larger or another model."""
        wanted = {item.storage_index.fqn for plan in global_plan for item in plan.items}
        if unknown := sorted(self.metadata.state_dict_metadata.keys() - wanted):
            raise _another_model(f"it also has {unknown[0]}")
        return super().create_global_plan(global_plan)


def _another_model(difference: str) -> UserError:
    return UserError(
        f"it is of another model or adapter: {difference}; set the recipe that it was made with, "
        "or begin anew elsewhere"
    )


class CheckpointWriter(FsspecWriter):
    """A file a process, to a folder or to S3."""

    def __init__(self, url: str, clear: Callable[[], None], complete: Callable[[], None]) -> None:
        """Nothing is written yet.

        Args:
            url: Where the files go.
            clear: Removes what is there of an earlier try; called on one process, before any
                writes.
            complete: Called on one process once the files of all are durable. What it raises,
                every process raises.
        """
        # A file is synced before it counts as written. In S3 it is durable once it is closed.
        super().__init__(url, sync_files="://" not in url, **FSSPEC_OPTIONS)
        self._clear = clear
        self._complete = complete

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing yet: what one process makes here, another may just be clearing away."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Prepare on one process, once all have planned and before any of them writes."""
        self._clear()
        self.fs.mkdir(self.path)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what is this process's.

        Raises:
            OSError: of a full disk, say; torch's archive, as it is closed, hides it behind an error
                of its own.
        """
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """After all processes wrote; the only place where a checkpoint becomes one."""
        super().finish(metadata, results)
        self._complete()
