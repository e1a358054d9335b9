"""One file of a source, on a local disk or in a remote store."""

import re
from dataclasses import dataclass

LOCAL = "file://"
# `s3://bucket/key`, and fsspec's chains such as `simplecache::https://host/file`.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")


@dataclass(frozen=True)
class Input:
    """One file of a source."""

    path: str  # relative to the source's root, with forward slashes; shown to users
    url: str  # an absolute local path or a URL; never part of an output
    bytes: int
    identity: tuple[tuple[str, str], ...] = ()  # store's values that change with the content

    @property
    def is_remote(self) -> bool:
        """Whether the file is read from a store, perhaps over a network."""
        return is_url(self.url)


def is_url(path: str) -> bool:
    """Return whether `path` is a URL for fsspec; a local path is opened without fsspec."""
    return _URL.match(path) is not None
