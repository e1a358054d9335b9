"""Readers bring the bytes of files to a device; several kinds share one protocol.

    mmap          through the page cache; all processes of a machine share it
    pinned        O_DIRECT, or buffered, into pinned buffers, then by a side stream to the device
    gds           straight into device memory, by GPUDirect Storage
    object_store  parallel range requests to S3 or a folder, by content hash

Token shards, checkpoints and model weights are all read by them.
"""

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipelines.core.errors import UserError

Numbers = npt.NDArray[np.int64]
Wait = Callable[[], None]

# Bytes a thread reads at a time, enough for a drive's or network's full rate. Pinned memory is
# rounded to a power of two, and this leaves room for the blocks that O_DIRECT reads around a piece.
PIECE = (8 << 20) - (64 << 10)
_COLD_SECONDS = 20e-6  # a row that takes longer was not in the page cache
_ADVISED_READS = 100  # number of reads until the time is measured again


class Ranges(NamedTuple):
    """Byte ranges of equal length: range i is `length` bytes at `offsets[i]` of `files[i]`."""

    files: Numbers  # [N], the numbers of a reader's files
    offsets: Numbers  # [N]
    length: int


class Reader(Protocol):
    """Brings byte ranges of its numbered files to its device.

    Attributes:
        name: The method in use, for the log and MLflow, such as `pinned (O_DIRECT)`.
        ahead: The useful number of reads to have in progress at once.
    """

    name: str
    ahead: int

    def read(self, ranges: Ranges, out: Tensor) -> Wait:
        """Begin to fill `out`, uint8 [N, length], contiguous, on the reader's device.

        Returns:
            A function to call before `out` is used on the current stream. It raises any error of
            the read; otherwise `out` has exactly the requested bytes.
        """
        ...


def read_whole(reader: Reader, file: int, offset: int, out: Tensor) -> Wait:
    """Begin to fill all of a contiguous tensor of any type with the bytes at an offset."""
    if not out.numel():
        return lambda: None
    into = out.view(-1).view(torch.uint8).unsqueeze(0)
    return reader.read(Ranges(np.array([file]), np.array([offset]), into.shape[1]), into)


class MmapReader:
    """Copies from memory maps; pages that aren't in memory are requested ahead of time."""

    name = "mmap"
    ahead = 16

    def __init__(self, paths: Sequence[Path]) -> None:
        """Map each file at its current size; a later truncation would kill the process (SIGBUS)."""
        self._paths = list(paths)
        self._maps = [_map(path) for path in paths]
        self._views = [np.frombuffer(found, np.uint8) for found in self._maps]
        self._advise = 0  # reads for which the kernel is told the pages ahead of time

    def read(self, ranges: Ranges, out: Tensor) -> Wait:
        """See `Reader`; the copy is made only when the caller waits for it."""
        if self._advise:
            self._advise -= 1
            for file, offset in _pairs(ranges):
                page = offset - offset % mmap.PAGESIZE
                found = self._maps[file]
                if isinstance(found, mmap.mmap):
                    found.madvise(mmap.MADV_WILLNEED, page, offset + ranges.length - page)
        return partial(self._copy, ranges, out)

    def _copy(self, ranges: Ranges, out: Tensor) -> None:
        staging = on_host(out)
        began = time.perf_counter()
        for row, (file, offset) in zip(staging.numpy(), _pairs(ranges), strict=True):
            view = self._views[file]
            if len(view) < offset + ranges.length:
                raise short_read(
                    self._paths[file], offset, ranges.length, max(0, len(view) - offset)
                )
            row[:] = view[offset : offset + ranges.length]
        if ranges.length <= mmap.PAGESIZE and not self._advise:
            seconds = time.perf_counter() - began
            self._advise = _ADVISED_READS * (seconds > _COLD_SECONDS * len(ranges.files))
        if staging is not out:
            out.copy_(staging, non_blocking=True)


def on_host(out: Tensor) -> Tensor:
    """Return memory that the host can fill for `out`: `out` itself, or pinned memory like it."""
    if out.device.type == "cpu":
        return out
    return torch.empty(out.shape, dtype=out.dtype, pin_memory=True)


class ThreadedReader:
    """A reader whose threads each fill one piece at a time; a subclass defines `fill`."""

    name: str
    ahead = 8

    def __init__(self, threads: int, device: torch.device | None = None) -> None:
        """Start no thread yet.

        Args:
            threads: How many pieces are filled at a time.
            device: The accelerator that `fill` uses; None if it only uses the host's memory.
        """
        self._pool = device_threads(threads, "reader", device or torch.device("cpu"))

    def read(self, ranges: Ranges, out: Tensor) -> Wait:
        """See `Reader`."""
        begun = [self._pool.submit(self.fill, *piece) for piece in pieces(ranges, out)]
        return partial(_wait_for, begun)

    def fill(self, file: int, offset: int, out: Tensor) -> torch.cuda.Event | None:
        """Fill `out`, uint8 [n <= PIECE], with the bytes at `offset`; runs in any thread.

        Returns:
            The event that the caller's stream must wait for, if any.
        """
        raise NotImplementedError


def device_threads(count: int, name: str, device: torch.device) -> ThreadPoolExecutor:
    """Return a pool of threads that each are on this process's device.

    A new thread is on device 0, where the first use of CUDA would take half a GiB for a context, in
    each process of a node.
    """
    if device.type == "cpu":
        return ThreadPoolExecutor(count, name)
    enter = partial(torch.accelerator.set_device_index, device.index or 0)
    return ThreadPoolExecutor(count, name, initializer=enter)


def pieces(ranges: Ranges, out: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (file, offset, part of `out`) of each range, cut if it is longer than `PIECE`."""
    for row, (file, offset) in zip(out, _pairs(ranges), strict=True):
        for start in range(0, ranges.length, PIECE):
            yield file, offset + start, row[start : start + PIECE]


def short_read(path: object, offset: int, wanted: int, found: int) -> UserError:
    """Return the error for a file that ends too early."""
    return UserError(
        f"{path}: {found} bytes at offset {offset}, but {wanted} were expected; the file is "
        "truncated or changed while it was read"
    )


def _wait_for(begun: list[Future[torch.cuda.Event | None]]) -> None:
    for each in begun:
        if event := each.result():
            torch.cuda.current_stream().wait_event(event)


def _pairs(ranges: Ranges) -> Iterator[tuple[int, int]]:
    return zip(ranges.files.tolist(), ranges.offsets.tolist(), strict=True)


def _map(path: Path) -> mmap.mmap | bytes:
    if path.stat().st_size == 0:  # an empty file can't be mapped
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
