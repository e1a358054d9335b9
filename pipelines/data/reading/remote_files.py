"""Reads files behind URLs with fsspec: `s3://`, `gs://`, `https://`, `memory://` and others.

Files are read in ranges of some MiB, one range ahead, so that a large file is never in memory as a
whole. Each range is tried several times and must have all its bytes.
"""

import io
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, TypeVar

from pipelines.core.errors import UserError
from pipelines.data.reading.inputs import Input

WILDCARDS = frozenset("*?[")
RANGE_BYTES = 8 << 20
_BUFFER_BYTES = 1 << 18
_TRIES = 5
_MOST_SECONDS = 8  # longest wait between two tries
_LISTING_THREADS = 16
# Stores' names for values that change with the content, best first: checksums, then tags.
_CHECKSUMS = ("contentmd5", "md5hash", "md5", "sha256", "digest", "checksum", "blobid", "etag")
_VERSIONS = {"versionid": "version", "generation": "version"}
_TIMES = ("lastmodified", "mtime", "modified", "modificationtime", "updated")


T = TypeVar("T")


class RemoteError(OSError):
    """A store did not answer correctly, even in the last of several tries."""


def list_remote(url: str) -> list[Input]:
    """Return the file at a URL, the files below it, or those that match its wildcards.

    Raises:
        UserError: There is no file, listing is not allowed, or fsspec lacks the protocol.
    """
    store, address = _store(url)
    root, facts = _tried(f"{url}: cannot be listed", _list, store, address)
    if not facts:
        raise UserError(f"{url}: no file lies there; fix data.source.path")
    return [_input(store, root, info) for info in facts]


def open_remote(url: str, stop: int | None = None) -> IO[bytes]:
    """Open a seekable file behind a URL; read-ahead ends at the byte `stop`.

    Raises:
        UserError: The file is gone or not readable, or the store does not say how long it is.
    """
    store, address = _store(url)
    file = RemoteFile(store, address, url, stop)
    if file.size > RANGE_BYTES and not has_ranges(url):
        return _tried(f"{url}: cannot be read", _spooled, store, address, file.size)
    return io.BufferedReader(file, _BUFFER_BYTES)


def has_ranges(url: str) -> bool:
    """Return whether the store can send a part of the file without the bytes before it."""
    store, address = _store(url)
    return "https" not in store.protocol or _tried(
        f"{url}: cannot be read", _sends_ranges, store, address
    )


class RemoteFile(io.RawIOBase):
    """A file in a store, read as a stream of ranges."""

    def __init__(self, store: Any, address: str, url: str, stop: int | None = None) -> None:
        self.url = url
        self._store = store
        self._address = address
        self.size = self._known_size()
        self._stop = self.size if stop is None else min(stop, self.size)
        self._position = 0
        self._start, self._range = 0, b""  # the range in memory
        self._ahead: Future[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "range")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position without reading anything."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        """Return the position of the next byte to read."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from the range in memory; return how many bytes, or 0 at the end."""
        if self._position >= self.size or not len(buffer):
            return 0
        offset = self._position - self._start
        if not 0 <= offset < len(self._range):
            # Fetch a small file whole: it is one request, which every server supports.
            self._load(0 if self.size <= RANGE_BYTES else self._position)
            offset = self._position - self._start
        part = memoryview(self._range)[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def close(self) -> None:
        """Close the file and cancel the read-ahead."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _load(self, start: int) -> None:
        goes_on = bool(self._range) and start == self._start + len(self._range)
        ahead = self._ahead if goes_on else None
        data = ahead.result() if ahead else self._fetch(start)
        self._start, self._range, self._ahead = start, data, None
        # Only a reader that goes on from range to range needs the next one.
        following = start + len(data)
        if following < self._stop and (goes_on or following == len(data)):
            self._ahead = self._thread.submit(self._fetch, following)

    def _fetch(self, start: int) -> bytes:
        is_small = self.size <= RANGE_BYTES
        limit = self._stop if start < self._stop and not is_small else self.size
        stop = min(start + RANGE_BYTES, limit)
        return _tried(f"{self.url}: cannot be read", self._fetch_once, start, stop)

    def _fetch_once(self, start: int, stop: int) -> bytes:
        data: bytes = self._store.cat_file(self._address, start=start, end=stop)
        if len(data) != stop - start:
            raise EOFError(f"{len(data)} of the {stop - start} bytes from byte {start}")
        return data

    def _known_size(self) -> int:
        info = _tried(f"{self.url}: cannot be read", self._store.info, self._address)
        if info.get("size") is None:
            raise UserError(f"{self.url}: the store gives no length; copy the file to a folder")
        return int(info["size"])


def _tried(what: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function, and again a few times at most if it fails with a temporary error.

    Raises:
        UserError: The file is missing or not accessible; `what` begins the message.
        RemoteError: The call failed for any other reason.
    """
    from tenacity import Retrying, retry_if_exception, stop_after_attempt
    from tenacity import wait_random_exponential as wait

    retrying = Retrying(
        stop=stop_after_attempt(_TRIES),
        wait=wait(0.2, max=_MOST_SECONDS),
        retry=retry_if_exception(_may_pass),
        reraise=True,
    )
    try:
        return retrying(function, *arguments)
    except UserError:
        raise
    except Exception as error:
        raise _explained(what, error) from error


def _explained(what: str, error: Exception) -> Exception:
    """Return a UserError, or a RemoteError, after which the caller may try again later."""
    # Each vendor's library has its own error class for missing keys.
    lacks_keys = "Credential" in type(error).__name__
    if lacks_keys or isinstance(error, FileNotFoundError | PermissionError):
        return UserError(f"{what} ({error or type(error).__name__}); check the address and keys")
    return RemoteError(f"{what}: {error!r}")


def _may_pass(error: BaseException) -> bool:
    """Return whether a retry may help: a network or server error, or missing bytes."""
    status = getattr(error, "status", None)  # the status of an HTTP client's error
    if isinstance(status, int):
        return status in (408, 425, 429) or status >= 500
    lasting = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
    is_client_error = type(error).__module__.startswith("aiohttp.")
    return (isinstance(error, OSError | EOFError) and not isinstance(error, lasting)) or (
        is_client_error
    )


def _store(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        store, address = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: fsspec cannot open it ({error})") from error
    # A listing cached by an earlier call in this process would hide a changed object.
    store.invalidate_cache()
    return store, address


def _list(store: Any, address: str) -> tuple[str, list[dict[str, Any]]]:
    root, found = _find(store, address)
    with ThreadPoolExecutor(_LISTING_THREADS) as pool:
        return root, list(pool.map(lambda item: _facts(store, *item), found.items()))


def _find(store: Any, address: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the folder to which file names are relative, and the store's facts on each file."""
    if not WILDCARDS.isdisjoint(address):
        found = store.glob(address, detail=True)
        fixed = address[: min(address.find(mark) for mark in WILDCARDS if mark in address)]
        return fixed.rpartition("/")[0], found
    # If asked for the files below a large file, a web server would send that whole file.
    if not address.endswith("/"):
        info = _info_or_none(store, address)
        if info is not None and info["type"] == "file":
            return address, {address: info}
    return address.rstrip("/"), store.find(address, detail=True)


def _info_or_none(store: Any, address: str) -> dict[str, Any] | None:
    try:
        info: dict[str, Any] = store.info(address)
    except FileNotFoundError:  # object stores also raise this for a prefix
        return None
    return info


def _facts(store: Any, name: str, info: dict[str, Any]) -> dict[str, Any]:
    """Return a file's facts, from the file itself if the listing lacks its size."""
    if info.get("size") is None and info.get("type") == "file":
        info = store.info(name)
    return {**info, "name": name}


def _input(store: Any, root: str, info: dict[str, Any]) -> Input:
    name = info["name"]
    return Input(
        # The root of a single file is the file itself, so keep its name.
        path=name.removeprefix(root).lstrip("/") or name.rpartition("/")[2],
        url=store.unstrip_protocol(name),
        bytes=int(info["size"] or 0),
        identity=_identity(info),
    )


def _identity(info: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return a checksum or tag and the version, or else the time of the last change if known."""
    known = {
        key.lower().replace("-", "").replace("_", ""): str(value).strip('"')
        for key, value in info.items()
        if value
    }
    checksums = [(key, known[key]) for key in _CHECKSUMS if key in known][:1]
    versions = [(name, known[key]) for key, name in _VERSIONS.items() if key in known][:1]
    times = [(key, known[key]) for key in _TIMES if key in known][:1]
    return (*checksums, *versions) or tuple(times)


def _sends_ranges(store: Any, address: str) -> bool:
    try:
        with store.open(address, "rb", cache_type="none") as file:
            file.seek(1)
            file.read(1)
    except ValueError:  # fsspec raises this if the server sent the whole file
        return False
    return True


def _spooled(store: Any, address: str, size: int) -> IO[bytes]:
    """Copy the whole file to a local disk, because the server sends no parts; return the copy."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    with store.open(address, "rb", block_size=0) as stream:
        shutil.copyfileobj(stream, copy, RANGE_BYTES)
    if copy.tell() != size:
        raise EOFError(f"{copy.tell()} of its {size} bytes")
    copy.seek(0)
    return copy
