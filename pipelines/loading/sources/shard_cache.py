"""Objects on a local drive, by content hash: bounded, checked, and shared by processes."""

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
_PART = ".part"  # of a name, while it is downloaded
_DEAD_SECONDS = 3600  # a download that wrote nothing for so long has no process any more
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_log = logging.getLogger(__name__)


class CacheFullError(Exception):
    """The drive has no room, or the object is larger than the whole cache may be."""


class ShardCache:
    """A folder of whole, verified objects; the ones not used for the longest time go first."""

    def __init__(self, folder: Path, limit: int) -> None:
        """Open or make a cache of at most `limit` bytes."""
        self.folder = folder
        self.limit = limit
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, file: RemoteFile, size: int, download: Callable[[int], None]) -> Path:
        """The path of an object, which is downloaded where it is absent.

        Several processes that want one object download it once.

        Args:
            file: What is wanted.
            size: Of the object, in bytes.
            download: Writes the object to an open file.

        Raises:
            CacheFullError: it doesn't fit.
            UserError: what was downloaded isn't what its name says.
        """
        path = self.folder / object_path(file.md5)
        path.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(self._lock(file.md5)):
            if not self._is_good(path, file):
                self._download(path, file, size, download)
            now = time.time_ns()  # the kernel's own is only some milliseconds exact
            os.utime(path, ns=(now, now))  # of its last use
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
        temporary = path.with_name(path.name + _PART)  # ours alone, by the lock
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
        """Delete what was not used for the longest time; who has it open keeps it."""
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
        """What lies here; the others may rename or delete it meanwhile."""
        found = []
        for path in self.folder.glob("files/md5/??/*"):
            with suppress(FileNotFoundError):
                found.append((path.stat(), path))
        return found

    def _delete(self, path: Path) -> bool:
        """Whether a file could go: not while another checks or fetches the object."""
        try:
            with one_at_a_time(self._lock(path.parent.name + path.name), wait=False):
                path.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        return True

    def _lock(self, name: str) -> Path:
        return self.folder / "locks" / name[:4]


def open_cache() -> ShardCache:
    """The cache that the environment names.

    Raises:
        UserError: its size is no number, or its folder can't be made.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "penstock" / "shards"
    folder = Path(os.environ.get(FOLDER_VARIABLE, default))
    text = os.environ.get(SIZE_VARIABLE, _DEFAULT_GB)
    try:
        return ShardCache(folder, int(float(text) * 1e9))
    except ValueError as error:
        raise UserError(f"{SIZE_VARIABLE}={text!r}: not a number of gigabytes") from error
    except OSError as error:
        raise UserError(
            f"{FOLDER_VARIABLE}={folder}: can't be used ({error.strerror}); name a folder on a "
            "local drive"
        ) from error
