"""File to device through pinned buffers: reads, copies and the device's work overlap.

Without CUDA the same code fills tensors in memory, from buffers that aren't pinned.
"""

import errno
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipelines.loading.readers import PIECE, Ranges, ThreadedReader, Wait, short_read

_log = logging.getLogger(__name__)
_ALIGN = 4096  # O_DIRECT: of offsets, sizes and addresses
_THREADS = 8  # each has a buffer: reads under way at once, as deep a queue as a drive likes


class PinnedReader(ThreadedReader):
    """Reads with O_DIRECT where the filesystem has it, copies on a stream of its own."""

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        super().__init__(_THREADS)
        self._paths = list(paths)
        self._direct = all(_takes_direct(path) for path in paths)
        self._files = [_open(path, self._direct) for path in paths]
        weakref.finalize(self, _close, self._files)
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._buffers = threading.local()
        kind = "pinned" if self._stream else "pinned, but for want of CUDA unpinned"
        self.name = f"{kind} ({'O_DIRECT' if self._direct else 'buffered'})"

    def read(self, ranges: Ranges, out: Tensor) -> Wait:
        """See `Reader`."""
        if self._stream is not None:
            # `out` may be memory that the current stream still has work for.
            self._stream.wait_stream(torch.cuda.current_stream(out.device))
            out.record_stream(self._stream)
        return super().read(ranges, out)

    def fill(self, file: int, offset: int, out: Tensor) -> torch.cuda.Event | None:
        """See `ThreadedReader`."""
        buffer = self._buffer()
        skip = offset % _ALIGN if self._direct else 0
        self._read(file, offset - skip, skip + len(out), buffer.memory)
        bytes_read = buffer.memory[skip : skip + len(out)]
        if self._stream is None:
            out.copy_(bytes_read)
            return None
        with torch.cuda.stream(self._stream):
            out.copy_(bytes_read, non_blocking=True)
            buffer.copied = self._stream.record_event()
        return buffer.copied

    def _read(self, file: int, offset: int, wanted: int, memory: Tensor) -> None:
        """Fill the first `wanted` bytes of `memory`, and up to a block more."""
        view = memory.numpy().data
        size = -(-wanted // _ALIGN) * _ALIGN if self._direct else wanted
        found = 0
        while found < wanted:
            count = os.preadv(self._files[file], [view[found:size]], offset + found)
            found += count
            if count == 0 or (self._direct and found % _ALIGN and found < wanted):  # at the end
                raise short_read(self._paths[file], offset, wanted, found)

    def _buffer(self) -> "_Buffer":
        """This thread's buffer, free to be filled again."""
        if not hasattr(self._buffers, "mine"):
            self._buffers.mine = _Buffer(pinned=self._stream is not None)
        mine: _Buffer = self._buffers.mine
        if mine.copied is not None:
            mine.copied.synchronize()
        return mine


class _Buffer:
    """Aligned memory for one piece, and the end of the last copy out of it."""

    def __init__(self, *, pinned: bool) -> None:
        memory = torch.empty(PIECE + 3 * _ALIGN, dtype=torch.uint8, pin_memory=pinned)
        self.memory = memory[-memory.data_ptr() % _ALIGN :]
        self.copied: torch.cuda.Event | None = None


def _takes_direct(path: Path) -> bool:
    """Whether the file can be read past the page cache; some filesystems refuse at the read."""
    try:
        descriptor = _open(path, direct=True)
        try:
            memory = _Buffer(pinned=False).memory
            os.preadv(descriptor, [memory.numpy().data[:_ALIGN]], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        _log.info("%s: its filesystem refuses O_DIRECT; reading through the page cache", path)
        return False
    return True


def _open(path: Path, direct: bool) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))


def _close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)
