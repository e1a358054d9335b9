"""Files that are whole or absent: atomic writes, completion markers, and locks around them.

A file of lines that grows: what a crash tore is dropped, what a full disk refused is kept.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MARKER = "COMPLETE"
_CHUNK = 1 << 20
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `path` so that a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Write `value` as indented JSON, atomically and with the same bytes for the same value."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    write_text(path, text + "\n", mode)


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Fill a temporary folder that replaces `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    temporary.chmod(0o755)
    try:
        yield temporary
        if path.exists():
            shutil.rmtree(path)
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def may_pass(error: BaseException) -> bool:
    """Whether waiting fixes it: a disk is full, or a network file system does not answer."""
    return isinstance(error, OSError) and error.errno in _PASSING


@contextmanager
def one_at_a_time(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock between processes and threads; the kernel releases what a dead process held.

    Args:
        path: The lock's file, made where it is missing; it stays.
        wait: For another holder to release it.

    Raises:
        BlockingIOError: another holds it, and `wait` is false.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(path).acquire(timeout=-1 if wait else 0)
    except Timeout as error:
        raise BlockingIOError(f"{path} is locked") from error
    with held:
        yield


def mark_complete(folder: Path, facts: dict[str, Any] | None = None) -> None:
    """Write the folder's completion marker; everything else in it must be on disk already."""
    write_json(folder / MARKER, facts or {})


def is_complete(folder: Path) -> bool:
    """Whether `mark_complete` was reached."""
    return (folder / MARKER).is_file()


def md5(path: Path) -> str:
    """The hex MD5 of a file's content, which is also its name in DVC's cache."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def folder_hash(folder: Path) -> str:
    """A SHA-256 over the relative path and content of every file in a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{md5(path)}\n".encode())
    return digest.hexdigest()


def folder_bytes(folder: Path) -> int:
    """The size of all files in a folder, links not followed; a file that vanishes is none."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.lstat().st_size if not path.is_dir() else 0
    return total


_log = logging.getLogger(__name__)


class LineFile:
    """Lines that one process appends; they never end what is being recorded.

    Attributes:
        path: The file, made with the first line.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is read or written yet."""
        self.path = path
        self._size: int | None = None  # bytes of whole lines
        self._waiting = ""  # what the disk had no room for
        self._anew: str | None = None  # likewise, where the file is to be replaced

    def read(self) -> list[str]:
        """The whole lines that are there; a torn one at the end goes with the next `append`."""
        content = self.path.read_bytes() if self.path.is_file() else b""
        self._size = content.rfind(b"\n") + 1
        return content[: self._size].decode("utf-8").splitlines()

    def append(self, line: str) -> None:
        """Add a line, and those before it that could not be written."""
        if self._anew is not None:
            self.replace([*self._anew.splitlines(), line])
            return
        if self._size is None:
            self.read()
        self._waiting += f"{line}\n"
        content = self._waiting.encode("utf-8")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.truncate(self._size)
                file.write(content)
        except OSError as error:
            _log.warning("%s: its last lines wait: %s", self.path, error)
            return
        self._size = (self._size or 0) + len(content)
        self._waiting = ""

    def replace(self, lines: Iterable[str]) -> None:
        """Write the whole file anew; a reader sees the old one or the new one."""
        text = "".join(f"{line}\n" for line in lines)
        self._anew, self._waiting = text, ""
        try:
            write_text(self.path, text)
        except OSError as error:
            _log.warning("%s: can't be written anew yet: %s", self.path, error)
            return
        self._anew, self._size = None, len(text.encode("utf-8"))
