"""Reads byte ranges of objects in S3, by content hash in a DVC remote or by name.

DVC stores an object of MD5 `abcdef…` as `files/md5/ab/cdef…`, so a shard's record is enough to read
it. Many requests run at once.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from pipelines.core.errors import UserError, one_line
from pipelines.loading.sources.readers import Ranges, ThreadedReader, Wait, on_host

_log = logging.getLogger(__name__)
_TRIES = 8
_FIRST_PAUSE = 0.1  # seconds, doubled each time, 13 s in total
_READ_TIMEOUT = 15  # seconds without a byte
CONNECTIONS = 32

T = TypeVar("T")


class Stored(Protocol):
    """An object of a prefix in S3."""

    @property
    def key(self) -> str:
        """The object's key relative to the prefix."""

    @property
    def name(self) -> str:
        """The object's name as a user knows it."""

    @property
    def fix(self) -> str:
        """The advice for a user if the object is missing or wrong."""


class RemoteFile(NamedTuple):
    """A file of a DVC remote that a record names."""

    md5: str
    name: str  # for users

    @property
    def key(self) -> str:
        """The object's key relative to the remote."""
        return object_path(self.md5)

    @property
    def fix(self) -> str:
        """The advice for a user if the object is missing or wrong."""
        return "push the dataset version again"


def object_path(md5: str) -> str:
    """Return where DVC keeps an object, relative to its remote."""
    return f"files/md5/{md5[:2]}/{md5[2:]}"


class TransientError(Exception):
    """An error that may not happen in the next try."""


class S3Objects:
    """The objects of a prefix in S3, read by byte ranges.

    The endpoint is that of `AWS_ENDPOINT_URL`, and the credentials are those that boto3 finds.
    """

    def __init__(self, url: str) -> None:
        """Connect to `s3://bucket/prefix`."""
        import boto3
        from botocore.config import Config

        self.url = url.rstrip("/")
        self._bucket, _, self._prefix = self.url.removeprefix("s3://").partition("/")
        config = Config(
            connect_timeout=5,
            read_timeout=_READ_TIMEOUT,
            max_pool_connections=CONNECTIONS,
            retries={
                "max_attempts": 1,
                "mode": "standard",
            },  # our retries also see broken bodies
        )
        self._client = boto3.session.Session().client("s3", config=config)

    def stat(self, file: Stored) -> tuple[int, str]:
        """Return the size and the ETag, which changes with the content."""
        found = self._retried(file, lambda: self._client.head_object(**self._place(file)))
        return found["ContentLength"], found["ETag"]

    def read(
        self,
        file: Stored,
        etag: str,
        start: int,
        length: int,
        is_right: Callable[[bytes], bool] = lambda _: True,
    ) -> bytes:
        """Return a byte range of an object that has not changed since `stat`.

        Args:
            file: The object.
            etag: The ETag that `stat` returned.
            start: The first byte.
            length: The number of bytes.
            is_right: Checks the content; if it returns False, the range is requested again.

        Raises:
            UserError: the object was replaced, or the range can't be read in several tries.
        """
        last = start + length - 1
        asked = self._place(file) | {"Range": f"bytes={start}-{last}", "IfMatch": etag}

        def get() -> bytes:
            answer = self._client.get_object(**asked)
            wanted = f"bytes {start}-{last}/"
            if not answer.get("ContentRange", "").startswith(wanted):
                raise TransientError(f"asked for {wanted}, got {answer.get('ContentRange')}")
            if answer["ETag"] != etag:
                raise self._replaced(file)
            body: bytes = answer["Body"].read(length + 1)
            if len(body) != length:
                raise TransientError(f"got {len(body)} bytes of {length}")
            if not is_right(body):
                raise TransientError("the content has another checksum")
            return body

        return self._retried(file, get)

    def _place(self, file: Stored) -> dict[str, str]:
        prefix = f"{self._prefix}/" if self._prefix else ""
        return {"Bucket": self._bucket, "Key": prefix + file.key}

    def _retried(self, file: Stored, call: Callable[[], T]) -> T:
        """Call, and call again after an error of network or server that may pass."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        for tried in range(1, _TRIES + 1):
            try:
                return call()
            except ClientError as error:
                self._raise_if_final(file, error)
                reason: Exception = error
            except (TransientError, BotoCoreError, HTTPError, OSError) as error:
                reason = error
            if tried < _TRIES:
                _log.info("%s of %s, try %d: %s", file.name, self.url, tried, reason)
                time.sleep(_FIRST_PAUSE * 2 ** (tried - 1))
        raise UserError(
            f"{self._what(file)} can't be read in {_TRIES} tries: {one_line(reason)}"
        ) from reason

    def _raise_if_final(self, file: Stored, error: Any) -> None:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        what = self._what(file)
        if status == 412:
            raise self._replaced(file) from error
        if status == 404:
            raise UserError(f"{what} is missing; {file.fix}") from error
        if 400 <= status < 500 and status not in (408, 429):
            raise UserError(f"{what}: {one_line(error)}") from error

    def _replaced(self, file: Stored) -> UserError:
        return UserError(f"{self._what(file)} was replaced while it was read; {file.fix}")

    def _what(self, file: Stored) -> str:
        return f"{self.url}: {file.name} ({file.key})"


def folder_of(url: str) -> Path | None:
    """Return a remote's folder, or None if the remote is not a folder."""
    if "://" in url and not url.startswith("file://"):
        return None
    return Path(url.removeprefix("file://"))


_BLOCK = 16 << 10
_BLOCKS = 1024  # blocks that are kept


class NamedObject(NamedTuple):
    """An object that is found by its name below a prefix."""

    key: str
    fix: str

    @property
    def name(self) -> str:
        """The object's name as a user knows it."""
        return self.key


class ObjectReader(ThreadedReader):
    """Reads objects by range requests; no object may change after the reader is made."""

    ahead = 16

    def __init__(self, objects: S3Objects, files: Sequence[NamedObject]) -> None:
        """Request the objects' ETags.

        Raises:
            UserError: an object is missing.
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
    """Reads small, scattered pieces of objects in blocks, which are kept for later reads."""

    def __init__(self, objects: S3Objects, fix: str) -> None:
        """Prepare to read without fetching anything; `fix` is that of `NamedObject`."""
        self._objects = objects
        self._fix = fix
        self._lock = Lock()
        self._stats: dict[str, tuple[int, str]] = {}
        self._block = lru_cache(_BLOCKS)(self._fetch)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return some bytes of an object; fewer at its end."""
        first, last = offset // _BLOCK, (offset + length - 1) // _BLOCK
        content = b"".join(self._block(name, number) for number in range(first, last + 1))
        return content[offset - first * _BLOCK :][:length]

    def _fetch(self, name: str, number: int) -> bytes:
        file = NamedObject(name, self._fix)
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
