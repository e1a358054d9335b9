"""One file of a source, wherever it lies."""

import re
from dataclasses import dataclass

LOCAL = "file://"
# `s3://bucket/key`, and fsspec's chains such as `simplecache::https://host/file`.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")


@dataclass(frozen=True)
class Input:
    """One file of a source."""

    path: str  # relative to the source's root, with forward slashes; what a user is shown
    url: str  # an absolute local path or a URL; never part of an output
    bytes: int
    identity: tuple[tuple[str, str], ...] = ()  # what a store says that follows the content

    @property
    def is_remote(self) -> bool:
        """Whether reading it goes through a store, and so maybe over a network."""
        return is_url(self.url)


def is_url(path: str) -> bool:
    """Whether fsspec is to open it; a local path is opened without."""
    return _URL.match(path) is not None
