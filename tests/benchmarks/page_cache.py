"""A cold read: the page cache is emptied of a benchmark's files before a round."""

import os
from pathlib import Path
from typing import Any


def empty_cache(folder: Path, options: dict[str, Any]) -> None:
    """Drop what lies in the folder from the page cache, unless the case is a warm one."""
    if not options.get("cold", True):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
