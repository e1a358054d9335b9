"""Files that are either whole or absent: atomic writes, completion markers and locks."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pipelines.core.errors import DamagedFileError, UnreachableError, UserError, one_line

MARKER = "COMPLETE"
_CHUNK = 1 << 20
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `path` so that a reader sees either all old or all new content."""
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


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise UserError where a file is that cannot be read; UnreachableError if it may be later."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        kind = UnreachableError if may_pass(error) else UserError
        raise kind(f"{path}: cannot be read ({error.strerror})") from error


def read_bytes(path: Path) -> bytes:
    """Read a small file; raise UserError as `readable`."""
    with readable(path):
        return path.read_bytes()


def read_text(path: Path) -> str:
    """Read a small file of UTF-8; raise UserError as `read_bytes`, or if it is damaged."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{path}: not UTF-8 text; the file is damaged") from error


def read_json(path: Path) -> Any:
    """Read a JSON file; raise UserError as `read_text`."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"not valid JSON: {one_line(error)}; the file is damaged"
        raise DamagedFileError(f"{path}: {reason}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; raise UserError as `read_json`."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise DamagedFileError(f"{path}: not a JSON object; the file is damaged")
    return values


def sync_folder(folder: Path, files: str = "*") -> None:
    """Wait until a power cut would take none of a folder's files, nor the folder itself."""
    for path in (*folder.rglob(files), folder, folder.parent):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def fresh_folder(path: Path, made_in: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` if the block ends without an error.

    Once that is done, a power cut takes none of its files.

    Args:
        path: The folder to replace or to create.
        made_in: The temporary folder's parent, on the same file system; by default `path`'s.
    """
    made_in = made_in or path.parent
    made_in.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=made_in, prefix=f".{path.name}."))
    temporary.chmod(0o755)
    try:
        yield temporary
        os.sync()  # in one go, which for many files is faster than one by one
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            shutil.rmtree(path)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def what_is_full(error: BaseException, folder: Path) -> str:
    """Return an error's message, which names inodes if it is these that a disk has no more of."""
    text = one_line(error)
    with suppress(OSError):
        state = os.statvfs(folder)
        if getattr(error, "errno", None) == errno.ENOSPC and state.f_files and not state.f_favail:
            return f"no inodes are left there, of which each file takes one: {text}"
    return text


def may_pass(error: BaseException) -> bool:
    """Return whether waiting may help: a disk is full or a network file system unreachable."""
    return isinstance(error, OSError) and error.errno in _PASSING


@contextmanager
def one_at_a_time(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock between processes and threads; the kernel releases a dead process's lock.

    Args:
        path: The lock file, which is created if it is missing and never deleted.
        wait: Whether to wait until another holder releases the lock.

    Raises:
        BlockingIOError: Another process or thread holds the lock, and `wait` is false.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(path).acquire(timeout=-1 if wait else 0)
    except Timeout as error:
        raise BlockingIOError(f"{path} is locked") from error
    with held:
        yield


@contextmanager
def alone_or_refused(path: Path, refusal: str) -> Iterator[None]:
    """Hold a lock as `one_at_a_time`; raise a UserError with this line if another holds it."""
    with ExitStack() as held:
        try:
            held.enter_context(one_at_a_time(path, wait=False))
        except BlockingIOError:
            raise UserError(refusal) from None
        yield


def check_new_folder(path: Path, what: str) -> None:
    """Raise UserError if `path` is a link, a file or a folder with files; `what` needs it new."""
    if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError(f"{path} exists already; {what} needs a new or an empty folder")


def mark_complete(folder: Path, facts: dict[str, Any] | None = None) -> None:
    """Write the folder's completion marker; all its other files must be on disk already."""
    write_json(folder / MARKER, facts or {})


def md5(path: Path) -> str:
    """Return the hex MD5 of a file's content, which is also its name in DVC's cache."""
    digest = hashlib.md5(usedforsecurity=False)
    with readable(path), path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def folder_hash(folder: Path) -> str:
    """Return a SHA-256 over the relative path and content of every file in a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{md5(path)}\n".encode())
    return digest.hexdigest()


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; links are not followed, deleted files ignored."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.lstat().st_size if not path.is_dir() else 0
    return total
