"""The place of a run's checkpoints: a folder, or a prefix in S3. This module needs no torch.

identity               hash of the run that the checkpoints belong to
start                  which copies in machines' memory belong to it, if it makes them
step-000100/
    __0_0.distcp ...   tensors, one file per process
    .metadata          which tensor lies where
    COMPLETE           written last: step, seconds and loss as JSON
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel

from pipelines.core.checked_json import parse_model
from pipelines.core.errors import UnreachableError, UserError, one_line
from pipelines.core.storage import MARKER, folder_bytes, read_text, write_text
from pipelines.recipe.recipe import Recipe

CHECKPOINTS = "checkpoints"  # in a workspace; the history is always there
_IDENTITY = "identity"
_START = "start"
_PREFIX = "step-"
_PROBE = "writable"
FIX = "delete the checkpoint, and the run goes on from the one before it"
# Each store must see other processes' files, and the endpoint that the environment names now.
FSSPEC_OPTIONS: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}


def place_of_run(checkpoints: str | None, workspace: Path) -> str:
    """Return where a run's checkpoints lie: in its workspace, or below `train.checkpoints`."""
    if checkpoints is None:
        return str(workspace / CHECKPOINTS)
    return f"{checkpoints.rstrip('/')}/{workspace.name}"


def checkpoints_of(recipe: Recipe, workspace: Path) -> str:
    """Return where the checkpoints of this workspace's run lie: a folder or an s3:// URL."""
    return place_of_run(recipe.train.checkpoints, workspace)


def copies_of(recipe: Recipe, workspace: Path) -> list[str]:
    """Return the further places to which they are copied, in the recipe's order."""
    return [place_of_run(more.place, workspace) for more in recipe.train.more_checkpoints]


def checkpoint_places(recipe: Recipe, workspace: Path) -> set[str]:
    """Return all places where this workspace's run keeps its history or its checkpoints."""
    places = checkpoints_of(recipe, workspace), *copies_of(recipe, workspace)
    return {str(workspace / CHECKPOINTS), *places}


class _Facts(BaseModel):
    step: int
    seconds: float
    loss: float | None
    others: dict[str, dict[str, Any]]


class Start(BaseModel):
    """The steps since a run last began, of which its machines' memory may have copies."""

    name: str
    step: int  # after which it began, ...
    after: str  # ... of this start; no name: from a checkpoint, or at first


class CheckpointStore:
    """The checkpoints of one run; one without its marker is incomplete and does not count.

    Attributes:
        place: The folder, or s3://bucket/prefix.
    """

    def __init__(self, url: str | Path) -> None:
        """Open the place; nothing is read or made yet.

        Args:
            url: A folder, or s3://bucket/prefix, that all processes share and no other run uses.
        """
        self.place = str(url)
        self._place = _open(self.place)

    def probe(self, key: str) -> None:
        """Write and delete a small file; the place must be new.

        Args:
            key: The recipe's key that names the place, for the error.

        Raises:
            UserError: nothing can be written there.
        """
        try:
            self._place.write(_PROBE, "")
            self._place.remove(_PROBE)
            self._place.remove("")
        except OSError as error:
            raise UserError(
                f"{key}: {self._place.url('')} cannot be written: {one_line(error)}"
            ) from error

    def claim(self, identity: str) -> None:
        """Delete incomplete checkpoints, and all checkpoints if another run made them.

        One process calls this before training.

        Raises:
            UserError: the place was never claimed but has files, so they belong to a user.
        """
        before = self._place.read(_IDENTITY)
        if before is None and (foreign := self._claimed()):
            raise UserError(
                f"{self._place.url(foreign[0])} is no checkpoint's, and would be deleted; "
                "give the recipe a place for checkpoints that is used for nothing else"
            )
        if before != identity:
            self.clear()
            self._place.write(_IDENTITY, identity)
        whole = set(self.steps())
        for step in self._all():
            if step not in whole:
                self.remove(step)

    def identity(self) -> str:
        """Return what it was claimed with; raise UserError if it never was."""
        identity = self._place.read(_IDENTITY)
        if identity is None:
            raise UserError(f"{self.place}: no run has claimed this place for its checkpoints")
        return identity

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints in ascending numeric order."""
        return sorted(step for step in self._all() if self._place.exists(f"{_name(step)}/{MARKER}"))

    def url(self, step: int) -> str:
        """Return where a checkpoint lies."""
        return self._place.url(_name(step))

    def facts(self, step: int) -> dict[str, Any]:
        """Return the facts that `complete` wrote; raise UserError if they are not whole."""
        text = self._place.read(f"{_name(step)}/{MARKER}")
        if text is None:
            raise UserError(f"{self.url(step)}: no complete checkpoint")
        facts = parse_model(text.encode(), _Facts, f"{self.url(step)}/{MARKER}")
        if facts.step != step:
            raise UserError(f"{self.url(step)} is of step {facts.step}; {FIX}")
        return facts.model_dump()

    def begin(self, start: Start) -> None:
        """Note a start of the run; copies of others no longer count."""
        self._place.write(_START, start.model_dump_json())

    def start(self) -> Start | None:
        """Return the last start that was noted; raise UserError if it is damaged."""
        text = self._place.read(_START)
        return parse_model(text.encode(), Start, self._place.url(_START)) if text else None

    def complete(self, step: int, facts: dict[str, Any]) -> None:
        """Mark a checkpoint as complete; all its files must be durable, except for their names."""
        self._place.sync(_name(step))
        text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
        self._place.write(f"{_name(step)}/{MARKER}", text)

    def copy(self, step: int, to: "CheckpointStore") -> None:
        """Copy a complete checkpoint from this place, a folder, to another; its marker comes last.

        Raises:
            OSError: The other place is a folder, and its disk is full, for example.
            UserError: Somebody removes one of the two meanwhile; or the other place is in S3, and
                refuses it: UnreachableError if it is away.
        """
        name, folder = _name(step), Path(self.url(step))
        if folder.resolve() == Path(to.url(step)).resolve():
            raise UserError(f"{to.place} is where the checkpoints lie already")
        to.remove(step)  # what an earlier try left
        sizes = self._place.sizes(name)
        sizes.pop(MARKER, None)
        to._place.make(name)
        for file in sorted(sizes):
            to._place.put(folder / file, f"{name}/{file}")
        # Another process of this run may have begun, and have removed what is incomplete.
        marker = self._place.read(f"{name}/{MARKER}")
        if marker is None or to._place.sizes(name) != sizes:
            raise UserError(f"{to.url(step)}: it, or {folder}, was removed while it was copied")
        to._place.sync(name)
        to._place.write(f"{name}/{MARKER}", marker)

    def remove(self, step: int) -> None:
        """Delete a checkpoint, its marker first, so that a partly deleted one does not count."""
        self._place.remove(f"{_name(step)}/{MARKER}")
        self._place.remove(_name(step))

    def clear(self) -> None:
        """Delete everything; the place stays claimed until the last file is gone."""
        # Markers first: if this is cut off, the run that owns them may claim the place again.
        for step in self._all():
            self._place.remove(f"{_name(step)}/{MARKER}")
        for name in self._claimed():
            self._place.remove(name)
        self._place.remove(_IDENTITY)

    def bytes(self) -> int:
        """Return the bytes that everything takes."""
        return self._place.bytes()

    def prune(self, keep: int, keep_best: bool, held: Collection[int] = ()) -> None:
        """Keep the newest `keep`, what is `held`, and with `keep_best` the one of the lowest loss.

        All others before the newest one are deleted, complete or not.
        """
        whole = self.steps()
        kept = {*whole[-keep:], *held}
        if keep_best:
            losses = {step: self.facts(step)["loss"] for step in whole}
            known = {step: loss for step, loss in losses.items() if loss is not None}
            kept.update([min(known, key=lambda step: known[step])] if known else [])
        for step in self._all():
            if step < whole[-1] and step not in kept:
                self.remove(step)

    def _claimed(self) -> list[str]:
        """Return all names except the identity's and those that writing it may have left."""
        return sorted(name for name in self._place.list() if _IDENTITY not in name)

    def _all(self) -> Iterator[int]:
        for name in self._place.list():
            number = name.removeprefix(_PREFIX)
            if name != number and number.isdigit():
                yield int(number)


class _Place(Protocol):
    """Small files and folders below one root; names are relative to the root."""

    def url(self, name: str) -> str: ...
    def list(self) -> list[str]: ...
    def exists(self, name: str) -> bool: ...
    def read(self, name: str) -> str | None: ...
    def write(self, name: str, text: str) -> None: ...
    def make(self, name: str) -> None: ...
    def put(self, path: Path, name: str) -> None: ...
    def sizes(self, name: str) -> dict[str, int]: ...
    def remove(self, name: str) -> None: ...
    def bytes(self) -> int: ...
    def sync(self, name: str) -> None: ...


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def url(self, name: str) -> str:
        return str(self._root / name)

    def list(self) -> list[str]:
        return [path.name for path in self._root.glob("*")]

    def exists(self, name: str) -> bool:
        return (self._root / name).exists()

    def read(self, name: str) -> str | None:
        path = self._root / name
        return read_text(path) if path.is_file() else None

    def write(self, name: str, text: str) -> None:
        write_text(self._root / name, text)
        self.sync(str(Path(name).parent))

    def make(self, name: str) -> None:
        (self._root / name).mkdir(parents=True)

    def put(self, path: Path, name: str) -> None:
        shutil.copyfile(path, self._root / name)
        self.sync(name)

    def sizes(self, name: str) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in (self._root / name).iterdir()}

    def remove(self, name: str) -> None:
        path = self._root / name
        try:
            path.unlink(missing_ok=True)
        except IsADirectoryError:  # not asked before: another process may have just made it
            shutil.rmtree(path)

    def bytes(self) -> int:
        return folder_bytes(self._root)

    def sync(self, name: str) -> None:
        """Sync a file, or a folder's names, so that a power failure does not lose them."""
        descriptor = os.open(self._root / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Bucket:
    """A prefix in S3, where an object is either complete and durable or does not exist."""

    def __init__(self, root: str) -> None:
        from fsspec.core import url_to_fs

        self._root = root.rstrip("/")
        self._store, self._path = url_to_fs(self._root, **FSSPEC_OPTIONS)

    def url(self, name: str) -> str:
        return f"{self._root}/{name}"

    def list(self) -> list[str]:
        with self._one_line():
            if not self._store.exists(self._path):
                return []
            found = self._store.ls(self._path, detail=False)
        return [str(path).rpartition("/")[2] for path in found]

    def exists(self, name: str) -> bool:
        with self._one_line():
            return bool(self._store.exists(f"{self._path}/{name}"))

    def read(self, name: str) -> str | None:
        with self._one_line():
            try:
                content: bytes = self._store.cat_file(f"{self._path}/{name}")
            except FileNotFoundError:
                return None
        return content.decode(errors="replace")

    def write(self, name: str, text: str) -> None:
        with self._one_line():
            self._store.pipe_file(f"{self._path}/{name}", text.encode())

    def make(self, name: str) -> None:
        pass

    def put(self, path: Path, name: str) -> None:
        with self._one_line():
            self._store.put_file(str(path), f"{self._path}/{name}")

    def sizes(self, name: str) -> dict[str, int]:
        with self._one_line():
            found = self._store.ls(f"{self._path}/{name}", detail=True)
        return {str(each["name"]).rpartition("/")[2]: int(each["size"]) for each in found}

    def remove(self, name: str) -> None:
        path = f"{self._path}/{name}".rstrip("/")
        with self._one_line():
            if self._store.exists(path):
                self._store.rm(path, recursive=True)

    def bytes(self) -> int:
        with self._one_line():
            return int(self._store.du(self._path)) if self._store.exists(self._path) else 0

    def sync(self, name: str) -> None:
        pass

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (FileNotFoundError, PermissionError) as error:
            raise UserError(f"{self._root}: {one_line(error)}") from error
        except (OSError, BotoCoreError, ClientError) as error:
            raise UnreachableError(f"{self._root}: {one_line(error)}") from error


def _open(url: str) -> _Place:
    if "://" not in url:
        return _Folder(Path(url))
    if not url.startswith("s3://"):
        raise UserError(f"{url}: checkpoints go to a folder or an s3:// URL only")
    return _Bucket(url)


def _name(step: int) -> str:
    return f"{_PREFIX}{step:06d}"
