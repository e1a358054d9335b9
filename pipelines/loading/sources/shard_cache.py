"""Cache of objects on a local drive by content hash; it is bounded, verified and shared."""

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.storage import md5, one_at_a_time
from pipelines.loading.sources.s3_objects import RemoteFile, object_path

FOLDER_VARIABLE = "PENSTOCK_SHARD_CACHE"
SIZE_VARIABLE = "PENSTOCK_SHARD_CACHE_GB"
_DEFAULT_GB = "200"
_PART = ".part"  # suffix of a file while it is downloaded
_DEAD_SECONDS = 3600  # the process of a download that wrote nothing for so long is dead
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_log = logging.getLogger(__name__)


class CacheFullError(Exception):
    """The drive has no room, or the object is larger than the cache's limit."""


class ShardCache:
    """A folder of whole, verified objects; the least recently used are deleted first."""

    def __init__(self, folder: Path, limit: int) -> None:
        """Open or make a cache of at most `limit` bytes."""
        self.folder = folder
        self.limit = limit
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, file: RemoteFile, size: int, download: Callable[[int], None]) -> Path:
        """Return the path of an object, which is downloaded if it is absent.

        Several processes that need the same object download it only once.

        Args:
            file: The object.
            size: The object's size in bytes.
            download: Writes the object to an open file descriptor.

        Raises:
            CacheFullError: the object doesn't fit.
            UserError: the downloaded content doesn't match the hash.
        """
        path = self.folder / object_path(file.md5)
        path.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(self._lock(file.md5)):
            if not self._is_good(path, file):
                self._download(path, file, size, download)
            now = time.time_ns()  # the kernel's own time is exact only to some milliseconds
            os.utime(path, ns=(now, now))  # the time of last use
        return path

    def _is_good(self, path: Path, file: RemoteFile) -> bool:
        if not path.is_file():
            return False
        if md5(path) == file.md5:
            return True
        _log.warning("%s: damaged in the cache; fetching %s again", path, file.name)
        path.unlink()
        return False

    def _download(
        self, path: Path, file: RemoteFile, size: int, download: Callable[[int], None]
    ) -> None:
        temporary = path.with_name(path.name + _PART)  # the lock keeps other processes off it
        try:
            self._make_room(size)
            with temporary.open("wb") as open_file:
                download(open_file.fileno())
            found = md5(temporary)
            if found != file.md5:
                raise UserError(
                    f"{file.name}: the remote's object has the md5 {found}, but {file.md5} was "
                    "pushed; it is damaged: push the dataset version again"
                )
            temporary.replace(path)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise CacheFullError(f"{self.folder}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Delete the least recently used objects; a process that has one open can still read it."""
        if size > self.limit:
            raise CacheFullError(f"{self.folder}: {size} bytes exceed {SIZE_VARIABLE}")
        with one_at_a_time(self._lock("room")):
            found = self._files()
            excess = size + sum(stat.st_size for stat, _ in found) - self.limit
            for stat, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
                if excess <= 0:
                    break
                if path.suffix != _PART or stat.st_mtime < time.time() - _DEAD_SECONDS:
                    excess -= stat.st_size * self._delete(path)

    def _files(self) -> list[tuple[os.stat_result, Path]]:
        """Return all files; other processes may rename or delete some of them meanwhile."""
        found = []
        for path in self.folder.glob("files/md5/??/*"):
            with suppress(FileNotFoundError):
                found.append((path.stat(), path))
        return found

    def _delete(self, path: Path) -> bool:
        """Delete a file, unless a process checks or fetches it; return whether it was deleted."""
        try:
            with one_at_a_time(self._lock(path.parent.name + path.name), wait=False):
                path.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        return True

    def _lock(self, name: str) -> Path:
        return self.folder / "locks" / name[:4]


def open_cache() -> ShardCache:
    """Return the cache that the environment names.

    Raises:
        UserError: its size is not a number, or its folder can't be made.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "penstock" / "shards"
    folder = Path(os.environ.get(FOLDER_VARIABLE, default))
    text = os.environ.get(SIZE_VARIABLE, _DEFAULT_GB)
    try:
        return ShardCache(folder, int(float(text) * 1e9))
    except (ValueError, OverflowError) as error:
        raise UserError(f"{SIZE_VARIABLE}={text!r}: not a number of gigabytes") from error
    except OSError as error:
        raise UserError(
            f"{FOLDER_VARIABLE}={folder} can't be used ({error.strerror}); name a folder on a "
            "local drive"
        ) from error
