"""Checkpoints of `torch.distributed.checkpoint`, each tensor read straight into its place.

PyTorch's own reader unpickles every tensor on the CPU and copies it from there. This one learns
from the same file where a tensor's bytes lie, and has a `Reader` bring them to the device. What
is read whole must have the checksum (CRC-32) that it was written with, which PyTorch's ignores.
"""

import math
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from pipelines.core.errors import UserError
from pipelines.loading.choice import open_for_bulk
from pipelines.loading.object_ranges import NamedObject, ObjectBlocks, ObjectReader
from pipelines.loading.readers import Reader, Wait, read_whole
from pipelines.loading.remote import CONNECTIONS, S3Objects
from pipelines.training.checkpoint_record import DamagedError, StoredTensor, stored_tensor
from pipelines.training.checkpoint_store import FSSPEC_OPTIONS

_MEND = "delete the checkpoint, and the run goes on from the one before it"


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
        """Of a folder, or of a prefix in S3."""
        self._url = str(url)
        super().__init__(self._url, **FSSPEC_OPTIONS)
        self._objects = S3Objects(self._url) if "://" in self._url else None
        self._read_at = (
            ObjectBlocks(self._objects, _MEND).read if self._objects else self._read_file
        )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which tensors there are.

        Raises:
            UserError: it is missing or damaged.
        """
        try:
            return super().read_metadata(*args, **kwargs)
        except Exception as error:  # whatever a damaged pickle may do
            raise UserError(f"{self._url}/.metadata is damaged or missing; {_MEND}") from error

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
            raise UserError(
                f"{self._url}/{file} is missing, and {name} with it; {_MEND}"
            ) from error
        except DamagedError as error:
            raise UserError(
                f"{self._url}/{file}: {name} is damaged or the file truncated; {_MEND}"
            ) from error

    def _read_file(self, name: str, offset: int, length: int) -> bytes:
        path = Path(self._url) / name
        if not path.is_file():
            raise UserError(f"{path} is not there; {_MEND}")
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
            raise UserError(f"{self._url}/{stored.file}: {name} is damaged; {_MEND}")

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
            objects = [NamedObject(file, _MEND) for file in files]
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
