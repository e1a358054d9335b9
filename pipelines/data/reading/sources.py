"""Finds the files of a recipe's source, and computes the fingerprint of their content.

Inputs are named relative to the source's root, so that the same data has the same fingerprint in
every place: a file has its name, a folder's files are relative to the folder, a glob's files to the
last folder without a wildcard, and a store's files to their prefix. Links are followed, but not by
a glob's `**`.
"""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from pipelines.core.errors import UserError
from pipelines.data.reading import hub_datasets
from pipelines.data.reading.extension_sources import list_shards
from pipelines.data.reading.inputs import LOCAL, Input, is_url
from pipelines.data.reading.remote_files import WILDCARDS, list_remote, open_remote
from pipelines.recipe.data_section import Source

_HASHING_THREADS = 4
# Skipped: installed packages are not the standard library, and compiled files are not text.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


def list_inputs(source: Source) -> list[Input]:
    """Return the source's files, sorted by path; the shards of an extension, in its own order.

    Raises:
        UserError: The path does not exist, holds no file, or is not fully readable.
    """
    if source.kind == "stdlib":
        return _library_files()
    if source.extension is not None:
        return list_shards(source.extension)
    path = str(source.path).removeprefix(LOCAL)
    if source.kind == "huggingface" and not Path(path).expanduser().is_dir():
        return [hub_datasets.hub_input(path, source.revision)]
    inputs = list_remote(path) if is_url(path) else _local_files(path)
    return sorted(inputs, key=lambda found: found.path)


def fingerprint(source: Source) -> dict[str, Any]:
    """Return the source's part of the stage cache's key, by the content that preprocess reads.

    It depends only on relative paths and content, not on absolute paths or modification times.
    """
    found = list_inputs(source)
    size = len(found) // (8 * _HASHING_THREADS) + 1  # a thread's turn takes longer than a file
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        parts = (found[i : i + size] for i in range(0, len(found), size))
        hashed = pool.map(lambda part: list(map(_identity, part)), parts)
        identities = list(chain.from_iterable(hashed))
    inputs = [
        {"path": each.path, "bytes": each.bytes, **identity}
        for each, identity in zip(found, identities, strict=True)
    ]
    facts: dict[str, Any] = {"kind": source.kind, "inputs": inputs}
    if source.kind == "stdlib":
        facts["python"] = platform.python_version()
    return facts


def describe(source: Source) -> str:
    """Return the source's name in error messages and in a model's card."""
    if source.extension is not None:
        return f"the source {source.extension.name}"
    return "the Python standard library" if source.kind == "stdlib" else str(source.path)


def open_input(url: str, stop: int | None = None) -> IO[bytes]:
    """Open an input's bytes, seekable; a remote input is read ahead at most to the byte `stop`.

    Raises:
        UserError: The file is not readable, or is gone.
    """
    if is_url(url):
        return open_remote(url, stop)
    try:
        return Path(url).open("rb")
    except OSError as error:
        raise UserError(f"{url}: cannot be read ({error.strerror})") from error


def _library_files() -> list[Input]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in _walk(root, _NOT_LIBRARY) if path.suffix == ".py" and path.is_file()]
    if not files:
        raise UserError(f"{root} holds no .py file; use data.source.kind=files with your own text")
    return sorted((_local(path, root) for path in files), key=lambda found: found.path)


def _local_files(path: str) -> list[Input]:
    given = Path(path).expanduser().absolute()
    if given.is_dir():
        files = list(filter(_is_file, _walk(given, {"__pycache__"})))
        if not files:
            raise UserError(f"{given}: the folder holds no file; put text, JSONL or Parquet there")
        return [_local(file, given) for file in files]
    if given.exists():
        return [_local(given, given.parent)]
    if WILDCARDS.isdisjoint(path):
        raise UserError(f"{given}: no such file or folder; fix data.source.path")
    return _matches(given)


def _matches(pattern: Path) -> list[Input]:
    parts = pattern.parts
    depth = next(i for i, part in enumerate(parts) if not WILDCARDS.isdisjoint(part))
    root, rest = Path(*parts[:depth]), str(Path(*parts[depth:]))
    files = [path for path in root.glob(rest) if _is_file(path)]
    if not files:
        raise UserError(f"{pattern}: the pattern matches no file; fix data.source.path")
    return [_local(path, root) for path in files]


def _walk(root: Path, skipped: set[str], above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield files below `root`, also behind links, but no hidden names such as .git or .DS_Store.

    Raises:
        UserError: A folder cannot be listed, or links form a circle.
    """
    if (real := root.resolve()) in above:
        raise UserError(f"{root}: links below this folder lead back to it; remove them")
    try:
        with os.scandir(root) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"{root}: cannot be listed ({error.strerror})") from error
    for entry in entries:
        if entry.name[0] == ".":
            continue
        # For a circle of links the entry's own raises an error; of others it knows without asking.
        if Path(entry.path).is_dir() if entry.is_symlink() else entry.is_dir():
            if entry.name not in skipped:
                yield from _walk(Path(entry.path), skipped, (*above, real))
        else:
            yield Path(entry.path)


def _is_file(path: Path) -> bool:
    """Return whether it is a file, and not a pipe or device.

    Raises:
        UserError: It is a link to nothing, perhaps to a disk that is not mounted.
    """
    if path.is_file():
        return True
    with suppress(OSError):  # a circle of links
        if path.exists() or not path.is_symlink():
            return False
    raise UserError(f"{path}: this link points to no file; fix or remove it")


def _local(path: Path, root: Path) -> Input:
    name = path.relative_to(root).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{root}: the name {name!r} is not UTF-8; rename that file") from error
    return Input(name, str(path), path.stat().st_size)


def _identity(found: Input) -> dict[str, str]:
    """Return the store's value that changes with the content, or else the content's MD5."""
    if found.identity:
        return dict(found.identity)
    with open_input(found.url) as file:
        digest = hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False))  # type: ignore[arg-type]
    return {"md5": digest.hexdigest()}
