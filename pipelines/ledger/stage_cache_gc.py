"""What the stage cache may forget: results of other days that no kept workspace holds."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from pipelines.core.storage import read_json
from pipelines.ledger.stage_cache import WHOLE, locked

_ENTRIES = "runs/*/*/*"  # DVC's run cache: a result's entry, by its key and its content
_OBJECTS = "files/md5/*/*"  # by their MD5; a folder's listing has .dir at its end
_LISTING = ".dir"


def unneeded(cache: Path, workspaces: Iterable[Path], older_than: float) -> list[Path]:
    """The files that may go, entries before objects: no entry ever names a deleted one.

    An entry stays while a workspace holds what it names, or while it is young. An object stays
    while an entry that stays or a workspace names it, or while it is young itself.

    Args:
        cache: The stage cache that all workspaces share.
        workspaces: Those that are kept.
        older_than: Seconds since the epoch; what was made later is young.
    """
    named = {oid for workspace in workspaces for oid in _held_by(workspace)}
    entries = []
    for path in sorted(cache.glob(_ENTRIES)):
        torn = path.name.startswith(".")  # its writer was killed
        outputs = set() if torn else set(_hashes(_yaml(path)["outs"]))
        if path.stat().st_mtime < older_than and (torn or not outputs <= named):
            entries.append(path)
        else:
            named |= outputs
    for listing in [oid for oid in named if oid.endswith(_LISTING)]:
        named.update(_listed(cache, listing))
    return entries + [
        path
        for path in sorted(cache.glob(_OBJECTS))
        if path.stat().st_mtime < older_than and path.parent.name + path.name not in named
    ]


def forget(cache: Path, workspaces: Iterable[Path], older_than: float) -> int:
    """Delete what is `unneeded` while no stage restores or commits; returns its bytes."""
    freed = 0
    with locked(cache, WHOLE, exclusive=True):
        for path in unneeded(cache, workspaces, older_than):
            freed += path.stat().st_size
            path.unlink()
            with suppress(OSError):  # there are others
                path.parent.rmdir()
    return freed


def _held_by(workspace: Path) -> Iterator[str]:
    """What its stages have read and written."""
    lock = workspace / "dvc.lock"
    if lock.is_file():
        for stage in _yaml(lock)["stages"].values():
            yield from _hashes([*stage.get("deps", []), *stage.get("outs", [])])


def _hashes(files: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    yield from (file["md5"] for file in files if "md5" in file)


def _listed(cache: Path, listing: str) -> Iterator[str]:
    path = cache / "files" / "md5" / listing[:2] / listing[2:]
    if path.is_file():  # a workspace may read what was never in the cache
        yield from (file["md5"] for file in read_json(path))


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))
