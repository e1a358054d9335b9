"""Byte ranges of named objects in S3, many requests at once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from threading import Lock
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pipelines.loading.readers import Ranges, ThreadedReader, Wait, on_host
from pipelines.loading.remote import CONNECTIONS, S3Objects

_BLOCK = 16 << 10
_BLOCKS = 1024  # of these are kept


class NamedObject(NamedTuple):
    """An object by its name below a prefix."""

    key: str
    mend: str

    @property
    def name(self) -> str:
        """For people."""
        return self.key


class ObjectReader(ThreadedReader):
    """Reads objects by range requests; each must stay the one that it was when this was made."""

    ahead = 16

    def __init__(self, objects: S3Objects, files: Sequence[NamedObject]) -> None:
        """Ask for the objects' ETags.

        Raises:
            UserError: one is not there.
        """
        super().__init__(CONNECTIONS)
        self._objects = objects
        self._files = list(files)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            self._etags = [etag for _, etag in pool.map(objects.stat, self._files)]
        self.name = f"object_store ({objects.url})"

    def read(self, ranges: Ranges, out: Tensor) -> Wait:
        """See `Reader`."""
        staging = on_host(out)
        return partial(_deliver, super().read(ranges, staging), staging, out)

    def fill(self, file: int, offset: int, out: Tensor) -> None:
        """See `ThreadedReader`."""
        content = self._objects.read(self._files[file], self._etags[file], offset, len(out))
        out.numpy()[:] = np.frombuffer(content, np.uint8)


class ObjectBlocks:
    """Small pieces here and there of objects: they are fetched by blocks, each of them once."""

    def __init__(self, objects: S3Objects, mend: str) -> None:
        """Nothing is fetched yet; `mend` is of `NamedObject`."""
        self._objects = objects
        self._mend = mend
        self._lock = Lock()
        self._stats: dict[str, tuple[int, str]] = {}
        self._block = lru_cache(_BLOCKS)(self._fetch)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Some bytes of an object; fewer where it ends."""
        first, last = offset // _BLOCK, (offset + length - 1) // _BLOCK
        content = b"".join(self._block(name, number) for number in range(first, last + 1))
        return content[offset - first * _BLOCK :][:length]

    def _fetch(self, name: str, number: int) -> bytes:
        file = NamedObject(name, self._mend)
        with self._lock:
            if name not in self._stats:
                self._stats[name] = self._objects.stat(file)
        size, etag = self._stats[name]
        start = number * _BLOCK
        length = min(_BLOCK, size - start)
        return self._objects.read(file, etag, start, length) if length > 0 else b""


def _deliver(wait: Wait, staging: Tensor, out: Tensor) -> None:
    wait()
    if staging is not out:
        out.copy_(staging, non_blocking=True)
