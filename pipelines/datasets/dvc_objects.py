"""Where the files of dataset versions lie: a DVC remote, by content hash, in a folder or on S3.

Everything written here is named by its MD5, so nothing is ever overwritten, and whatever is read
is hashed again before anyone uses it. S3 takes its endpoint (AWS_ENDPOINT_URL) and its keys from
the environment or AWS's own files; none of them is written anywhere.
"""

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from typing_extensions import TypedDict

from pipelines.core.checked_json import parse_model
from pipelines.core.errors import UserError, one_line
from pipelines.core.storage import md5

_CHUNK = 1 << 20
_OID = re.compile("[0-9a-f]{32}")
_THREADS = 8  # hashing lets go of Python's lock, and S3 answers late


@dataclass(frozen=True)
class File:
    """One file of a version: where it lies in the version's folder, and the object it is."""

    path: str
    oid: str  # its MD5


class _Listed(TypedDict):
    relpath: str
    md5: str


@dataclass(frozen=True)
class Tree:
    """A hashed folder: what DVC calls a `.dir` object, and where its files can be read."""

    hash: str  # ends in .dir
    bytes: int
    files: tuple[File, ...]
    staged: Any  # DVC's object database of the files where they are


class ObjectStore:
    """The DVC remote at a folder or an s3:// address.

    Raises:
        UserError: the address is of no such kind.
    """

    def __init__(self, remote: str) -> None:
        if not remote.startswith(("/", "s3://")):
            raise UserError(
                f"PENSTOCK_DATASETS_REMOTE = {remote}: give a folder, or s3://bucket/prefix"
            )
        self.remote = remote

    def push(self, tree: Tree) -> None:
        """Copy the objects that are not there yet; the listing of the folder goes last.

        Raises:
            UserError: there is no such bucket, or it is not ours to write to.
            OSError: some objects were not taken.
        """
        from dvc_data.hashfile.hash_info import HashInfo
        from dvc_data.hashfile.transfer import transfer

        listing = HashInfo("md5", tree.hash)
        if self.remote.startswith("/"):
            self._drop_damaged(tree)
        try:
            result = transfer(tree.staged, self._objects, {listing}, shallow=False)
        except FileNotFoundError as error:  # no such bucket
            raise self._refused(error) from error
        except _refusals() as error:
            raise self._refused(error) from error
        if result.failed:
            names = ", ".join(sorted(str(failed.value) for failed in result.failed)[:3])
            raise OSError(
                f"{self.remote}: {len(result.failed)} objects were not taken, such as {names}"
            )
        if result.transferred and self.remote.startswith("/"):
            os.sync()  # a power cut after the tag must not leave half an object

    def listing(self, tree_hash: str) -> list[File]:
        """Return the files of a version.

        Raises:
            UserError: the listing is missing or damaged.
        """
        content = self.read(File("the list of its files", tree_hash))
        entries = parse_model(content, list[_Listed], f"{self.remote}: {tree_hash}")
        for entry in entries:
            path, oid = PurePosixPath(entry["relpath"]), entry["md5"]
            outside = path.is_absolute() or ".." in path.parts or "\0" in str(path)
            if outside or not 0 < len(path.name) < 256 or not _OID.fullmatch(oid):
                raise UserError(
                    f"{self.remote}: {tree_hash} lists {path} as {oid}, which is not a file below "
                    "the version's folder; it was not made by Penstock, don't use it"
                )
        return [File(entry["relpath"], entry["md5"]) for entry in entries]

    def read(self, file: File) -> bytes:
        """Return the content of a small file; raises UserError as `fetch` does."""
        if reason := self.damage(file.oid):
            raise UserError(self._complaint(file, reason))
        content: bytes = self._fs.cat_file(self._objects.oid_to_path(file.oid))
        return content

    def fetch(self, files: Collection[File], folder: Path, on_file: Callable[[int], None]) -> None:
        """Copy files into a folder; each is hashed where it has arrived, and then counted.

        Raises:
            UserError: an object is missing or damaged; it is named.
        """
        with ThreadPoolExecutor(_THREADS) as threads:
            copies = threads.map(lambda file: self._fetch(file, folder / file.path), files)
            for done, _ in enumerate(copies, start=1):
                on_file(done)

    def damaged(self, files: Sequence[File]) -> Iterator[tuple[File, str]]:
        """Hash each object where it lies; the ones that are not what they are named, with why."""
        with ThreadPoolExecutor(_THREADS) as threads:
            reasons = threads.map(lambda file: self.damage(file.oid), files)
            yield from ((file, why) for file, why in zip(files, reasons, strict=True) if why)

    def damage(self, oid: str) -> str | None:
        """Return why an object can't be used; None for a sound one."""
        digest = hashlib.md5(usedforsecurity=False)
        try:
            place = self._objects.oid_to_path(oid)
            with _named(f"{self.remote}: {oid}"), self._fs.open(place, "rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        except FileNotFoundError:
            return "is missing"
        except _refusals() as error:
            raise self._refused(error) from error
        return _compared(digest.hexdigest(), oid)

    def _drop_damaged(self, tree: Tree) -> None:
        """DVC takes an object that is there for whole; a power cut may have left half of it.

        S3 keeps whole objects only.
        """
        files = {file.oid: file for file in (*tree.files, File("the list of its files", tree.hash))}
        places = {oid: Path(self._objects.oid_to_path(oid)) for oid in files}
        there = [file for oid, file in files.items() if places[oid].is_file()]
        for file, _ in self.damaged(there):
            places[file.oid].unlink(missing_ok=True)

    def _fetch(self, file: File, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _named(f"{target}, from {self.remote}"):
                self._fs.get_file(self._objects.oid_to_path(file.oid), str(target))
        except FileNotFoundError:
            raise UserError(self._complaint(file, "is missing")) from None
        except _refusals() as error:
            raise self._refused(error) from error
        target.chmod(0o644)  # the store's own copy is read-only
        if reason := _compared(md5(target), file.oid):
            target.unlink()
            raise UserError(self._complaint(file, reason))

    def _refused(self, error: Exception) -> UserError:
        return UserError(
            f"{self.remote}: {one_line(error)}; fix PENSTOCK_DATASETS_REMOTE, AWS_ENDPOINT_URL or "
            "the keys that AWS's own variables and files give"
        )

    def _complaint(self, file: File, reason: str) -> str:
        return f"{file.path}: its object {file.oid} in {self.remote} {reason}"

    @cached_property
    def _remote(self) -> tuple[Any, str]:
        from dvc.fs import parse_external_url

        filesystem, path = parse_external_url(self.remote)
        return filesystem, path

    @property
    def _fs(self) -> Any:
        return self._remote[0]

    @cached_property
    def _objects(self) -> Any:
        from dvc_data.hashfile.db import get_odb

        filesystem, path = self._remote
        return get_odb(filesystem, filesystem.join(path, "files", "md5"), hash_name="md5")


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say what was read or copied in an error of the system that names no file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or what
        raise


def hash_folder(folder: Path) -> Tree:
    """Read every file of a folder; nothing is believed for its time or size."""
    from dvc.fs import localfs
    from dvc_data.hashfile.build import build
    from dvc_data.hashfile.db import get_odb

    # Only names the staging area; the files stay where they are.
    objects = get_odb(localfs, str(folder), hash_name="md5")
    staged, meta, tree = build(objects, str(folder), localfs, "md5")
    files = tuple(File("/".join(key), info.value) for key, _, info in tree)
    return Tree(tree.hash_info.value, meta.size, files, staged)


def _refusals() -> tuple[type[Exception], ...]:
    """Return the errors of S3's client that a user can fix; called only after an error."""
    from botocore.exceptions import NoCredentialsError

    return (PermissionError, NoCredentialsError)


def _compared(found: str, oid: str) -> str | None:
    return None if found == oid.removesuffix(".dir") else f"is damaged: its content is {found}"
