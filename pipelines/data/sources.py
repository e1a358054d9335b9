"""Where text lies: the files behind a recipe's source, and the fingerprint of their content.

Inputs are named relative to the source's root, so that the same data fingerprints alike wherever
it lies: a file by its name, a folder's files relative to the folder, a glob's relative to the last
folder without a wildcard, an S3 object's relative to its prefix.
"""

import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipelines.core.errors import UserError
from pipelines.core.recipe_data import Source
from pipelines.core.storage import md5

WILDCARDS = frozenset("*?[")
S3 = "s3://"
# Installed packages are not the standard library, and compiled files are not text.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Input:
    """One file of a source."""

    path: str  # relative to the source's root, with forward slashes; what a person is shown
    url: str  # an absolute local path or an s3:// address; never part of an output
    bytes: int
    identity: tuple[tuple[str, str], ...] = ()  # of an S3 object: its etag and version

    @property
    def is_remote(self) -> bool:
        """Whether reading it goes over the network."""
        return self.url.startswith(S3)


def list_inputs(source: Source) -> list[Input]:
    """The source's files, sorted by path.

    Raises:
        UserError: the path does not exist, or nothing lies there.
    """
    if source.kind == "stdlib":
        return _library_files()
    path = str(source.path)
    inputs = _s3_objects(path) if path.startswith(S3) else _local_files(path)
    return sorted(inputs, key=lambda found: found.path)


def fingerprint(source: Source) -> dict[str, Any]:
    """What preprocess will read, by content: the source's part of the stage cache's key.

    Depends on nothing but relative paths and content: no absolute path, no modification time.
    """
    inputs = [
        {
            "path": found.path,
            "bytes": found.bytes,
            **(dict(found.identity) or {"md5": _checksum(found)}),
        }
        for found in list_inputs(source)
    ]
    facts: dict[str, Any] = {"kind": source.kind, "inputs": inputs}
    if source.kind == "stdlib":
        facts["python"] = platform.python_version()
    return facts


def describe(source: Source) -> str:
    """What an error message calls the source."""
    return "the standard library" if source.kind == "stdlib" else str(source.path)


def open_input(url: str) -> IO[bytes]:
    """Open an input's raw bytes, seekable.

    Raises:
        UserError: the file may not be read, or is gone.
    """
    try:
        if url.startswith(S3):
            return _s3().open(url, "rb")  # type: ignore[no-any-return]
        return Path(url).open("rb")
    except (PermissionError, FileNotFoundError) as error:
        raise UserError(f"{url}: cannot be read ({error.strerror or error})") from error


def _library_files() -> list[Input]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in _walk(root, _NOT_LIBRARY) if path.suffix == ".py"]
    if not files:
        raise UserError(f"{root} holds no .py file; use data.source.kind=files with your own text")
    return sorted((_local(path, root) for path in files), key=lambda found: found.path)


def _local_files(path: str) -> list[Input]:
    given = Path(path).expanduser().absolute()
    if given.is_dir():
        files = list(_walk(given, {"__pycache__"}))
        if not files:
            raise UserError(f"{given}: the folder holds no file; put text, JSONL or Parquet there")
        return [_local(file, given) for file in files]
    if given.exists():
        return [_local(given, given.parent)]
    if WILDCARDS.isdisjoint(path):
        raise UserError(f"{given}: no such file or folder; mend data.source.path")
    return _matches(given)


def _matches(pattern: Path) -> list[Input]:
    parts = pattern.parts
    depth = next(i for i, part in enumerate(parts) if not WILDCARDS.isdisjoint(part))
    root, rest = Path(*parts[:depth]), str(Path(*parts[depth:]))
    files = [path for path in root.glob(rest) if path.is_file()]
    if not files:
        raise UserError(f"{pattern}: the pattern matches no file; mend data.source.path")
    return [_local(path, root) for path in files]


def _walk(root: Path, skipped: set[str]) -> Iterator[Path]:
    """Regular files below `root`; hidden ones (.git, .DS_Store) are not data."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and name[0] != "."]
        paths = (Path(folder, name) for name in names if name[0] != ".")
        yield from (path for path in paths if path.is_file())


def _local(path: Path, root: Path) -> Input:
    return Input(path.relative_to(root).as_posix(), str(path), path.stat().st_size)


def _checksum(found: Input) -> str:
    try:
        return md5(Path(found.url))
    except PermissionError as error:
        raise UserError(f"{found.url}: cannot be read ({error.strerror})") from error


def _s3() -> Any:
    import fsspec

    # A listing cached by an earlier call in this process would hide a changed object.
    return fsspec.filesystem("s3", use_listings_cache=False)


def _s3_objects(url: str) -> list[Input]:
    address = url.removeprefix(S3)
    store = _s3()
    try:
        if WILDCARDS.isdisjoint(address):
            found = store.find(address, detail=True)
            root = address.rstrip("/")
        else:
            found = store.glob(address, detail=True)
            fixed = address[: min(address.find(mark) for mark in WILDCARDS if mark in address)]
            root = fixed.rpartition("/")[0]
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(f"{url}: cannot be listed ({error}); check the bucket and keys") from error
    objects = [
        _s3_object(name, root, info)
        for name, info in found.items()
        if info["type"] == "file" and not name.endswith("/")
    ]
    if not objects:
        raise UserError(f"{url}: no object lies there; mend data.source.path")
    return objects


def _s3_object(name: str, root: str, info: dict[str, Any]) -> Input:
    identity = {"etag": str(info["ETag"]).strip('"'), "version": info.get("VersionId")}
    return Input(
        # The prefix of a single object is the object itself: keep its name.
        path=name.removeprefix(root).lstrip("/") or name.rpartition("/")[2],
        url=S3 + name,
        bytes=int(info["size"]),
        identity=tuple((key, str(value)) for key, value in identity.items() if value),
    )
