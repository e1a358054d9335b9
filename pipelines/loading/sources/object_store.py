"""Reads shards straight from a DVC remote, without `dvc pull`.

A folder is read in place. From S3, whole shards go to a cache on a local drive by parallel range
requests; if the cache has no room, they are read sample by sample, ahead of time. In both cases a
shard's whole content is checked against its MD5 before its first use. Later reads must be of the
same object (by its ETag), and each block must still have the same checksum.
"""

import hashlib
import logging
import os
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.core.storage import md5
from pipelines.loading.sources.readers import (
    PIECE,
    MmapReader,
    Ranges,
    Reader,
    ThreadedReader,
    Wait,
    on_host,
    short_read,
)
from pipelines.loading.sources.s3_objects import (
    CONNECTIONS,
    RemoteFile,
    S3Objects,
    folder_of,
    object_path,
)
from pipelines.loading.sources.shard_cache import (
    FOLDER_VARIABLE,
    SIZE_VARIABLE,
    CacheFullError,
    ShardCache,
    open_cache,
)

_log = logging.getLogger(__name__)
_FETCHES = 4  # whole objects that are fetched at once, each by several requests
_BLOCK = 64 << 10  # divides PIECE
_OPENINGS = 3  # tries, as other runs may need the cache's room


class ObjectStore(Protocol):
    """Brings the objects of a remote to this machine."""

    def fetch(self, files: Sequence[RemoteFile]) -> list[Path]:
        """Fetch whole, verified objects, and return their local paths.

        Raises:
            UserError: an object can't be read, does not match its hash, or does not fit.
        """
        ...

    def open(self, files: Sequence[RemoteFile]) -> Reader:
        """Return a reader of verified objects.

        Raises:
            UserError: an object can't be read, or does not match its hash.
        """
        ...


def open_store(remote: str) -> ObjectStore:
    """Open the store of a DVC remote, which is a folder or an s3:// URL."""
    if folder := folder_of(remote):
        return FolderStore(folder)
    if not remote.startswith("s3://"):
        raise UserError(f"{remote}: shards can be streamed from a folder or an s3:// URL only")
    return S3Store(S3Objects(remote), open_cache())


class FolderStore:
    """A remote that is a folder: its files are read in place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fetch(self, files: Sequence[RemoteFile]) -> list[Path]:
        """See `ObjectStore`."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(self._verified, files))

    def open(self, files: Sequence[RemoteFile]) -> Reader:
        """See `ObjectStore`."""
        reader = MmapReader(self.fetch(files))
        reader.name = f"object_store ({self._folder}, by mmap)"
        return reader

    def _verified(self, file: RemoteFile) -> Path:
        path = self._folder / object_path(file.md5)
        if not path.is_file():
            raise UserError(f"{path}, which holds {file.name}, is missing; push the dataset again")
        if (found := md5(path)) != file.md5:
            raise UserError(f"{path}: {file.name} is damaged, its md5 is {found}; push it again")
        return path


class S3Store:
    """A remote in S3 with a local cache."""

    def __init__(self, objects: S3Objects, cache: ShardCache) -> None:
        self._objects = objects
        self._cache = cache
        self._requests = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="range")

    def fetch(self, files: Sequence[RemoteFile]) -> list[Path]:
        """See `ObjectStore`."""
        with ThreadPoolExecutor(_FETCHES) as pool:
            try:
                return list(pool.map(self._cached, files))
            except CacheFullError as error:
                raise UserError(f"no room in the shard cache: {error}") from error

    def open(self, files: Sequence[RemoteFile]) -> Reader:
        """See `ObjectStore`; shards that the cache has no room for are read from S3 each time."""
        for _ in range(_OPENINGS):
            try:
                return self._opened(files)
            except FileNotFoundError as error:
                _log.warning("%s: deleted before it was opened; trying again", error.filename)
        raise UserError(
            "the shard cache is too small for the runs that share it; enlarge it with "
            f"{SIZE_VARIABLE}, or give each run its own with {FOLDER_VARIABLE}"
        )

    def _opened(self, files: Sequence[RemoteFile]) -> Reader:
        """Return a reader; once open, its files stay readable even if they are deleted.

        Raises:
            FileNotFoundError: another run deleted a shard meanwhile to make room.
        """
        with ThreadPoolExecutor(_FETCHES) as pool:
            sources = list(pool.map(self._source, files, self._room_for(files)))
        paths = [source for source in sources if isinstance(source, Path)]
        if len(paths) == len(files):
            reader = MmapReader(paths)
            reader.name = f"object_store ({self._objects.url}, cached)"
            return reader
        return RangeReader(self._objects, sources)

    def _room_for(self, files: Sequence[RemoteFile]) -> Iterator[bool]:
        """Yield for each file whether it fits with those before it; more would evict each other."""
        room = self._cache.limit
        for file in files:
            room -= self._objects.stat(file)[0]
            yield room >= 0

    def _source(self, file: RemoteFile, fits: bool) -> "Path | _Remote":
        if fits:
            try:
                return self._cached(file)
            except CacheFullError as error:
                _log.warning("%s: read from %s each time: %s", file.name, self._objects.url, error)
        size, etag = self._objects.stat(file)
        digest = hashlib.md5(usedforsecurity=False)
        checksums: list[int] = []
        for part in self._parts(file, etag, size):
            digest.update(part)
            checksums += _checksums(part)
        if digest.hexdigest() != file.md5:
            raise UserError(
                f"{self._objects.url}: {object_path(file.md5)} should hold {file.name}, but its "
                f"md5 is {digest.hexdigest()}; it is damaged: push the dataset version again"
            )
        return _Remote(file, etag, size, array("I", checksums))

    def _cached(self, file: RemoteFile) -> Path:
        size, etag = self._objects.stat(file)

        def download(descriptor: int) -> None:
            for part in self._parts(file, etag, size):
                _write_all(descriptor, part)

        return self._cache.get(file, size, download)

    def _parts(self, file: RemoteFile, etag: str, size: int) -> Iterator[bytes]:
        """Yield the parts of the whole object in order, from requests that run ahead."""
        begun: deque[Future[bytes]] = deque()
        for start in range(0, size, PIECE):
            length = min(PIECE, size - start)
            begun.append(self._requests.submit(self._objects.read, file, etag, start, length))
            if len(begun) > CONNECTIONS // _FETCHES:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


class _Remote(NamedTuple):
    """A verified object that stays in S3."""

    file: RemoteFile
    etag: str
    size: int
    checksums: "array[int]"  # one per block: 4 bytes for 64 KiB

    def read(self, objects: S3Objects, offset: int, length: int) -> bytes:
        """Return some bytes of the object, after whole blocks were read and checked."""
        first, last = offset // _BLOCK, (offset + length - 1) // _BLOCK
        start, stop = first * _BLOCK, min((last + 1) * _BLOCK, self.size)
        wanted = self.checksums[first : last + 1].tolist()
        content = objects.read(
            self.file, self.etag, start, stop - start, lambda got: _checksums(got) == wanted
        )
        return content[offset - start : offset - start + length]


def _checksums(content: bytes) -> list[int]:
    view = memoryview(content)
    return [zlib.crc32(view[at : at + _BLOCK]) for at in range(0, len(view), _BLOCK)]


class RangeReader(ThreadedReader):
    """Reads samples by many range requests at once, and cached shards from their files."""

    ahead = 16

    def __init__(self, objects: S3Objects, sources: Sequence[Path | _Remote]) -> None:
        super().__init__(CONNECTIONS)
        self._objects = objects
        self._sources = [
            np.memmap(source, np.uint8, "r") if isinstance(source, Path) else source
            for source in sources
        ]
        remote = sum(isinstance(source, _Remote) for source in sources)
        self.name = f"object_store ({objects.url}, {remote} of {len(sources)} files not cached)"

    def read(self, ranges: Ranges, out: Tensor) -> Wait:
        """See `Reader`."""
        staging = on_host(out)
        return partial(_deliver, super().read(ranges, staging), staging, out)

    def fill(self, file: int, offset: int, out: Tensor) -> None:
        """See `ThreadedReader`."""
        source = self._sources[file]
        if isinstance(source, _Remote):
            content = np.frombuffer(source.read(self._objects, offset, len(out)), np.uint8)
        else:
            content = source[offset : offset + len(out)]
        if len(content) != len(out):  # NumPy would copy a single byte to all places
            raise short_read(f"file {file} of {self._objects.url}", offset, len(out), len(content))
        out.numpy()[:] = content


def _deliver(wait: Wait, staging: Tensor, out: Tensor) -> None:
    wait()
    if staging is not out:
        out.copy_(staging, non_blocking=True)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
