"""Checks that tensors have the checksum (CRC-32) that they were written with, several at once.

`zlib.crc32` releases the interpreter's lock, and one thread computes it slower than a drive reads.
It needs the bytes on the host: those of a GPU come back piece by piece, through pinned memory.
"""

import threading
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.loading.sources.readers import PIECE, device_threads

_THREADS = 8
_AHEAD = 2 * _THREADS  # tensors that wait for their check, and are kept in memory until then


class _Begun(NamedTuple):
    """A check in progress, and the error for a tensor that fails it."""

    found: Future[int]
    checksum: int
    damaged: UserError


class ChecksumThreads:
    """Threads that check tensors; the end of a `with` block waits for all checks."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._pools: dict[torch.device, ThreadPoolExecutor] = {}
        self._own = threading.local()  # each thread's stream and pinned memory
        self._begun: deque[_Begun] = deque()

    def check(self, tensor: Tensor, checksum: int, damaged: UserError) -> None:
        """Begin to check a contiguous tensor, which must not change until the block ends.

        Raises:
            UserError: `damaged` of a tensor that was begun earlier.
        """
        device = tensor.device
        if device not in self._pools:
            self._pools[device] = device_threads(_THREADS, "checksum", device)
        content = tensor.reshape(-1).view(torch.uint8)
        written = None if device.type == "cpu" else torch.cuda.current_stream().record_event()
        found = self._pools[device].submit(self._checksum, content, written)
        self._begun.append(_Begun(found, checksum, damaged))
        if len(self._begun) > _AHEAD:
            self._finish()

    def _checksum(self, content: Tensor, written: torch.cuda.Event | None) -> int:
        if written is None:
            return zlib.crc32(content.numpy().data)
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(content.device)  # type: ignore[no-untyped-call]
            self._own.buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._own.stream):
            self._own.stream.wait_event(written)
            return checksum_by_pieces(content, self._own.buffer)

    def _finish(self) -> None:
        begun = self._begun.popleft()
        if begun.found.result() != begun.checksum:
            raise begun.damaged

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Wait for all checks, unless the block failed."""
        try:
            while self._begun and kind is None:
                self._finish()
        finally:
            for pool in self._pools.values():
                pool.shutdown(cancel_futures=True)


def checksum_by_pieces(content: Tensor, buffer: Tensor) -> int:
    """Return the CRC-32 of uint8 [n] on any device, copied through the host's `buffer`."""
    checksum = 0
    for piece in torch.split(content, len(buffer)):
        here = buffer[: len(piece)]
        here.copy_(piece)  # the host waits: this thread has nothing else to do
        checksum = zlib.crc32(here.numpy().data, checksum)
    return checksum
