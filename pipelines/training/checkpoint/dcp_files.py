"""Reads and writes checkpoints of `torch.distributed.checkpoint`.

The writer makes a checkpoint durable, and marks it as complete last. The reader brings each tensor
straight into its place: PyTorch's own reader unpickles every tensor on the CPU and copies it from
there. This one finds a tensor's bytes in the same file, and has a `Reader` bring them to the
device. A tensor that is read whole must have the checksum (CRC-32) that it was written with;
PyTorch's reader ignores it. The planner checks that a checkpoint belongs to the model.

`torch.distributed.checkpoint` writes each tensor as `torch.save` does: a zip archive, in which
`data.pkl` holds the shape and type, and `data/0` holds the bytes uncompressed.
"""

import io
import math
import os
import pickle
import struct
import time
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
from torch.distributed.checkpoint.filesystem import FileSystem
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
from pipelines.training.checkpoint.checksums import ChecksumThreads
from pipelines.training.checkpoint.store import FIX, FSSPEC_OPTIONS

# The header of a file in a zip archive: 26 bytes, then the lengths of its name and extra fields.
_LOCAL_HEADER = struct.Struct("<26xHH")

# The name of the storage class for each type in `torch.save`'s format.
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
    """A record differs from what was written."""


class StoredTensor(NamedTuple):
    """A contiguous tensor in a file."""

    file: str  # path relative to the checkpoint
    offset: int  # of its first byte
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int  # CRC-32 of its bytes


# Maps an offset and a number of bytes to the bytes; fewer at the end of the file.
ReadAt = Callable[[int, int], bytes]


def stored_tensor(file: str, read_at: ReadAt, offset: int, length: int) -> StoredTensor | None:
    """Return the tensor in the record of `length` bytes at `offset`, or None if it is not plain.

    Raises:
        DamagedError: the record is no tensor's, or is truncated.
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
    """A part of a file that can be read like a file."""

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
    """Loads a contiguous tensor's shape and type from the pickle that `torch.save` writes.

    No code in the pickle is run: any name that a plain tensor does not need is refused.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a class or function that a plain tensor's pickle names."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _shape_and_dtype
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name} is not of a plain tensor")

    def persistent_load(self, pid: Any) -> torch.dtype:
        """Return the type in a storage's `pid`: ("storage", type, key, location, elements)."""
        dtype: torch.dtype = pid[1]
        return dtype


def _shape_and_dtype(
    dtype: torch.dtype, start: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> tuple[tuple[int, ...], torch.dtype]:
    contiguous = torch.empty(shape, device="meta").stride()
    if start or strides != contiguous:
        raise pickle.UnpicklingError("not contiguous")
    return shape, dtype


class _Begun(NamedTuple):
    """A read in progress: after `wait` returns, `part` has the values for `target`."""

    item: ReadItem
    stored: StoredTensor
    target: Tensor
    rows: Tensor  # is read
    part: Tensor  # a part of `rows`
    wait: Wait


class CheckpointReader(FsspecReader):
    """Reads `CheckpointWriter`'s files for any layout, with the same bits as `FsspecReader`."""

    def __init__(self, url: str | Path) -> None:
        """Keep the place of a checkpoint: a folder, or a prefix in S3."""
        self._url = str(url)
        super().__init__(self._url, **FSSPEC_OPTIONS)
        self._objects = S3Objects(self._url) if "://" in self._url else None
        self._read_at = ObjectBlocks(self._objects, FIX).read if self._objects else self._read_file

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata, which lists its tensors.

        Raises:
            UserError: the metadata is missing or damaged.
        """
        try:
            return super().read_metadata(*args, **kwargs)
        except Exception as error:  # a damaged pickle may raise anything
            raise UserError(f"{self._url}/.metadata is damaged or missing; {FIX}") from error

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors; PyTorch reads everything that is not a plain tensor."""
        with ThreadPoolExecutor(CONNECTIONS if self._objects else 1) as pool:
            found = list(zip(plan.items, pool.map(self._find, plan.items), strict=True))
        plain = [(item, stored) for item, stored in found if stored is not None]
        with ChecksumThreads() as threads:
            for begun in self._read_ahead(plain, planner):
                begun.wait()
                self._check(begun, threads)
                if begun.part is not begun.target:
                    begun.target.copy_(begun.part)
                planner.commit_tensor(begun.item, begun.target)
        return super().read_data(LoadPlan([item for item, stored in found if not stored]), planner)

    def _find(self, item: ReadItem) -> StoredTensor | None:
        """Return where the tensor lies that contains an item, or None if it is not plain."""
        info = self.storage_data[item.storage_index]
        if item.type is not LoadItemType.TENSOR or info.transform_descriptors:
            return None
        file, name = info.relative_path, item.storage_index.fqn
        try:
            return stored_tensor(file, partial(self._read_at, file), info.offset, info.length)
        except FileNotFoundError as error:
            raise UserError(f"{self._url}/{file} is missing, and {name} with it; {FIX}") from error
        except DamagedError as error:
            raise UserError(
                f"{self._url}/{file}: {name} is damaged or the file truncated; {FIX}"
            ) from error

    def _read_file(self, name: str, offset: int, length: int) -> bytes:
        path = Path(self._url) / name
        if not path.is_file():
            raise UserError(f"{path} is missing; {FIX}")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def _check(self, begun: _Begun, threads: ChecksumThreads) -> None:
        """Have the checksum of a tensor checked if it was read whole."""
        stored, name = begun.stored, begun.item.storage_index.fqn
        if begun.rows.shape == stored.shape:
            damaged = UserError(f"{self._url}/{stored.file}: {name} is damaged; {FIX}")
            threads.check(begun.rows, stored.checksum, damaged)

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
            objects = [NamedObject(file, FIX) for file in files]
            return ObjectReader(self._objects, objects)
        return open_for_bulk([Path(self._url) / file for file in files], device)


def _begin(
    item: ReadItem, stored: StoredTensor, target: Tensor, reader: Reader, file: int
) -> _Begun:
    """Begin to read the rows that an item needs, even where it needs only parts of them."""
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
    """Refuses a checkpoint whose tensors differ from those that the processes together need."""

    metadata: Metadata

    def create_local_plan(self) -> LoadPlan:
        """Return the plan of what this process reads.

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
        """Refuse, on one process, tensors that nobody reads: the model is larger or another one."""
        wanted = {item.storage_index.fqn for plan in global_plan for item in plan.items}
        if unknown := sorted(self.metadata.state_dict_metadata.keys() - wanted):
            raise _another_model(f"it also has {unknown[0]}")
        return super().create_global_plan(global_plan)


def _another_model(difference: str) -> UserError:
    return UserError(
        f"it is of another model or adapter: {difference}; use the recipe that it was made "
        "with, or start again in another place"
    )


_TELLING_BYTES = 64 << 20
_EARLY = 32 << 20  # bytes that are worth asking the drive for


class _EarlyFile(io.FileIO):
    """A file whose first bytes the drive writes while the next ones are copied and checked.

    Without it the drive begins when all bytes are there, as the file is synced.
    """

    _written = _asked = 0

    def write(self, content: Any, /) -> int:
        written = super().write(content)
        self._written += written
        if (more := self._written - self._asked) >= _EARLY:
            # Linux begins to write what it is advised to drop; it drops nothing that isn't written.
            os.posix_fadvise(self.fileno(), self._asked, more, os.POSIX_FADV_DONTNEED)
            self._asked = self._written
        return written


class _LocalFiles(FileSystem):
    """The files of a folder."""

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:
        """Return a new file; `CheckpointWriter` reads none."""
        return io.BufferedWriter(_EarlyFile(path, mode))


class CheckpointWriter(FsspecWriter):
    """Writes one file per process, to a folder or to S3."""

    def __init__(self, url: str, clear: Callable[[], None], complete: Callable[[], None]) -> None:
        """Set up the writer; nothing is written yet.

        Args:
            url: The place for the files.
            clear: Removes the files of an earlier try; called on one process, before any process
                writes.
            complete: Called on one process when the files of all are durable. Every process raises
                the error that it raises.
        """
        # A file is synced before it counts as written. In S3 a file is durable when it is closed.
        super().__init__(url, sync_files="://" not in url, **FSSPEC_OPTIONS)
        if "://" not in url:
            self.fs = _LocalFiles()
            self.path = self.fs.init_path(url)
        self._clear = clear
        self._complete = complete
        self.seconds_a_gib = math.nan  # of this process's file, if it is large enough to tell

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan without making files, as another process may clear the folder now."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Clear and make the folder on one process, when all have planned and before any writes."""
        self._clear()
        self.fs.mkdir(self.path)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's file.

        Raises:
            OSError: for example, the disk is full; torch's archive hides it behind its own error
                when it is closed.
        """
        began = time.perf_counter()
        try:
            written = super().write_data(plan, planner)
            size = sum(each.size_in_bytes for each in written.wait())
            if size >= _TELLING_BYTES:
                self.seconds_a_gib = (time.perf_counter() - began) * 2**30 / size
            return written
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Finish after all processes wrote; only here does a checkpoint become complete."""
        super().finish(metadata, results)
        self._complete()
