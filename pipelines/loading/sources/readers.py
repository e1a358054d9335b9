"""Readers: how the bytes of files reach a device. One protocol, several ways.

    mmap          through the page cache; all processes of a machine share it
    pinned        O_DIRECT, or buffered, into pinned buffers, and from there on a side stream
    gds           straight into device memory, by GPUDirect Storage
    object_store  parallel range requests to S3 or a folder, by content hash

Token shards, checkpoints and model weights all come through here.
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

PIECE = 8 << 20  # bytes a thread reads at a time: enough for a drive's or a network's full rate
_COLD_SECONDS = 20e-6  # a row that takes longer was not in the page cache
_ADVISED_READS = 100  # that go by until it is measured again


class Ranges(NamedTuple):
    """Byte ranges of one length: range i is `length` bytes at `offsets[i]` of file `files[i]`."""

    files: Numbers  # [N], the numbers of a reader's files
    offsets: Numbers  # [N]
    length: int


class Reader(Protocol):
    """Brings byte ranges of its files, which have numbers, to its device.

    Attributes:
        name: What is in effect, for log and MLflow, such as `pinned (O_DIRECT)`.
        ahead: Reads worth having under way at once.
    """

    name: str
    ahead: int

    def read(self, ranges: Ranges, out: Tensor) -> Wait:
        """Begin to fill `out`, uint8 [N, length], contiguous, on the reader's device.

        Returns:
            A function to call before `out` is used on the current stream; it raises what went
            wrong. Never are there fewer or other bytes than were asked for.
        """
        ...


def read_whole(reader: Reader, file: int, offset: int, out: Tensor) -> Wait:
    """Begin to fill all of a contiguous tensor of any type with the bytes at an offset."""
    if not out.numel():
        return lambda: None
    into = out.view(-1).view(torch.uint8).unsqueeze(0)
    return reader.read(Ranges(np.array([file]), np.array([offset]), into.shape[1]), into)


class MmapReader:
    """Copies out of memory maps; pages that aren't in memory are asked for ahead of time."""

    name = "mmap"
    ahead = 16

    def __init__(self, paths: Sequence[Path]) -> None:
        """Map each file as it is now: a later truncation would kill the process (SIGBUS)."""
        self._paths = list(paths)
        self._maps = [_map(path) for path in paths]
        self._views = [np.frombuffer(found, np.uint8) for found in self._maps]
        self._advise = 0  # reads for which the kernel is told what comes

    def read(self, ranges: Ranges, out: Tensor) -> Wait:
        """See `Reader`; the copy is made when it is waited for."""
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
    """Where a processor can fill what is meant for `out`: itself, or pinned memory like it."""
    if out.device.type == "cpu":
        return out
    return torch.empty(out.shape, dtype=out.dtype, pin_memory=True)


class ThreadedReader:
    """A reader whose threads each fill one piece at a time; a subclass says how."""

    name: str
    ahead = 8

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="reader")

    def read(self, ranges: Ranges, out: Tensor) -> Wait:
        """See `Reader`."""
        begun = [self._pool.submit(self.fill, *piece) for piece in pieces(ranges, out)]
        return partial(_wait_for, begun)

    def fill(self, file: int, offset: int, out: Tensor) -> torch.cuda.Event | None:
        """Fill `out`, uint8 [n <= PIECE], with the bytes at `offset`; runs in any thread.

        Returns:
            What the caller's stream must wait for, if anything.
        """
        raise NotImplementedError


def pieces(ranges: Ranges, out: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(file, offset, part of `out`) of each range, cut where it is longer than `PIECE`."""
    for row, (file, offset) in zip(out, _pairs(ranges), strict=True):
        for start in range(0, ranges.length, PIECE):
            yield file, offset + start, row[start : start + PIECE]


def short_read(path: object, offset: int, wanted: int, found: int) -> UserError:
    """The error for a file that ends too early."""
    return UserError(
        f"{path}: {found} bytes at offset {offset}, but {wanted} were to be read; the file is "
        "truncated or changes while it is read"
    )


def _wait_for(begun: list[Future[torch.cuda.Event | None]]) -> None:
    for each in begun:
        if event := each.result():
            torch.cuda.current_stream().wait_event(event)


def _pairs(ranges: Ranges) -> Iterator[tuple[int, int]]:
    return zip(ranges.files.tolist(), ranges.offsets.tolist(), strict=True)


def _map(path: Path) -> mmap.mmap | bytes:
    if path.stat().st_size == 0:  # can't be mapped
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
