"""The stage cache: DVC's run cache, shared by every workspace.

A stage's key is its command, the content of its deps and its params (`dvc.yaml`). DVC runs no
stages here: a hit checks outputs out, and after a stage ran, `commit` records its outputs.

Any number of runs may do so at once. DVC writes an entry before the objects that it names, and a
reader deletes an entry that another process has only half written, because it looks broken. So an
entry is looked up and written under its stage's lock, and `penstock gc` waits for all these locks.

`penstock gc` may delete old results that no kept workspace uses.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipelines.core.checked_yaml import read_yaml
from pipelines.core.errors import UserError
from pipelines.core.storage import md5, read_json
from pipelines.run.records import KEPT_FILE, OUTPUTS, output_folder

if TYPE_CHECKING:
    from dvc.repo import Repo

_log = logging.getLogger(__name__)
QUARANTINE = "quarantine"
WHOLE = "whole"  # lock of the whole cache: shared by its users, exclusive to delete from it
_LOCKS = "locks"


def restore(workspace: Path, stage: str) -> bool:
    """Check a stage's outputs out of the cache; return False if there is no sound entry.

    Every object is hashed before it is restored. If its hash is not its name, it is moved to the
    cache's `quarantine` folder, and the stage counts as not cached.
    """
    if _always_changes(workspace, stage):
        return False
    if told := kept(workspace).get(stage):
        _restore_kept(workspace, stage, told)
    elif not _restore_found(workspace, stage):
        return False
    os.sync()  # holds no lock that others need; a power cut then leaves no empty file
    return True


def _restore_found(workspace: Path, stage: str) -> bool:
    """Check out what the cache has for the stage's key; return False if that is nothing sound."""
    with _open(workspace) as repo:
        with locked(_folder(repo), stage, exclusive=False):
            cached = _lookup(repo, stage)
        if cached is None or not _sound(repo, cached):
            return False
        shutil.rmtree(output_folder(workspace, stage), ignore_errors=True)
        cached.checkout(force=True)
        repo.commit(stage, force=True)
        return True


def _restore_kept(workspace: Path, stage: str, told: Mapping[str, Any]) -> None:
    """Check out a result that a user keeps, without a new entry that other runs would find."""
    with _open(workspace) as repo:
        cached = repo.stage_cache._create_stage(told["entry"])
        if not _sound(repo, cached):
            raise UserError(
                f"--keep {stage}: the result of {told['run']} is no longer in the cache"
            )
        shutil.rmtree(output_folder(workspace, stage), ignore_errors=True)
        cached.checkout(force=True)
        (named,) = repo.stage.collect(stage)
        named.save(run_cache=False)
        named.commit()
        named.dump(update_pipeline=False)


def kept(workspace: Path) -> dict[str, Any]:
    """Return what `keep` recorded about each stage whose result a user keeps, by stage name."""
    path = workspace / KEPT_FILE
    found: dict[str, Any] = read_json(path) if path.is_file() else {}
    return found


def commit(workspace: Path, stage: str) -> None:
    """Record a finished stage: its outputs in the cache, its entry in `dvc.lock`."""
    if _always_changes(workspace, stage):
        return
    with _open(workspace) as repo, locked(_folder(repo), stage, exclusive=True):
        repo.commit(stage, force=True)
    os.sync()  # as in `restore`


def forecast(workspace: Path) -> dict[str, bool | None]:
    """Return which stages' results would be restored, without checking out or hashing any output.

    A stage has None if that depends on the output of an earlier stage that runs.
    """
    found: dict[str, bool | None] = {}
    outputs: dict[str, Any] = {}  # outputs of the cached stages, by path
    with _open(workspace) as repo:
        for name, said in stages(workspace).items():
            made = {dep for dep in said["deps"] if dep.startswith(f"{OUTPUTS}/")}
            if told := kept(workspace).get(name):
                found[name] = True
                stage = repo.stage_cache._create_stage(told["entry"])
                outputs |= {out.def_path: out for out in stage.outs}
            elif said.get("always_changed"):
                found[name] = False
            elif not made <= outputs.keys():
                found[name] = None
            else:
                with locked(_folder(repo), name, exclusive=False):
                    cached = _lookup(repo, name, outputs)
                found[name] = cached is not None
                outputs |= {out.def_path: out for out in cached.outs} if cached else {}
    return found


def shares_blocks(workspaces: Path, cache: Path) -> bool:
    """Return whether outputs lie in the cache without taking room again, as clones of files."""
    from dvc.fs import localfs

    try:
        for folder in (workspaces, cache):
            folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=workspaces) as ours, TemporaryDirectory(dir=cache) as theirs:
            file = Path(ours) / "file"
            file.write_bytes(b"\0")
            localfs.reflink(str(file), str(Path(theirs) / "file"))
    except OSError:  # the disk can't, or they are two disks
        return False
    return True


def stages(workspace: Path) -> dict[str, dict[str, Any]]:
    """Return each stage's section of `dvc.yaml`, in the order of the file."""
    found: dict[str, dict[str, Any]] = read_yaml(workspace / "dvc.yaml")["stages"]
    return found


def _always_changes(workspace: Path, stage: str) -> bool:
    """Return whether `dvc.yaml` says that the stage's result depends on more than its key."""
    return bool(stages(workspace)[stage].get("always_changed"))


@contextmanager
def locked(cache: Path, name: str, *, exclusive: bool) -> Iterator[None]:
    """Hold a lock of the cache within the block; `name` is a stage or `WHOLE`."""
    path = cache / _LOCKS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


@contextmanager
def _open(workspace: Path) -> Iterator["Repo"]:
    from dvc.repo import Repo, lock_repo

    with ExitStack() as held:
        # DVC looks up names and `dvc.yaml` in the working directory, not in the opened repo.
        held.enter_context(chdir(workspace))
        # Without waiting, a second process in this workspace would fail after three seconds.
        repo = held.enter_context(Repo(str(workspace), _wait_for_lock=True))
        held.enter_context(lock_repo(repo))
        held.enter_context(locked(_folder(repo), WHOLE, exclusive=False))
        yield repo


def _folder(repo: "Repo") -> Path:
    return Path(repo.cache.local.path).parent.parent


def _lookup(
    repo: "Repo", name: str, outputs: Mapping[str, Any] = MappingProxyType({})
) -> Any | None:
    """Return the cached stage, if any; `outputs`, by path, replace deps not checked out."""
    from dvc.dependency.base import DependencyDoesNotExistError
    from dvc.stage.cache import _get_cache_hash
    from dvc.stage.serialize import to_single_stage_lockfile

    # `Repo.stage_cache.restore` trusts an existing dvc.lock and does not check the content of the
    # deps, so this function computes the key from the files and loads the entry itself.
    (stage,) = repo.stage.collect(name)
    try:
        for dep in stage.deps:
            if (made := outputs.get(dep.def_path)) is None:
                dep.save()
            else:
                dep.hash_info, dep.meta = made.hash_info, made.meta
    except DependencyDoesNotExistError:
        return None
    # Like `StageCache._load`, which hashes each dep again and fails if an entry is incomplete.
    key = _get_cache_hash(to_single_stage_lockfile(stage), key=True)
    folder = Path(repo.stage_cache._get_cache_dir(key))
    entries = (
        sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        if folder.is_dir()
        else []
    )
    entry = repo.stage_cache._load_cache(key, entries[0].name) if entries else None
    if not entry:
        return None
    return repo.stage_cache._create_stage(entry, wdir=stage.wdir)


def _sound(repo: "Repo", cached: Any) -> bool:
    """Return whether each output object exists and hashes to its name; quarantine bad ones.

    DVC trusts an object that is read-only, and deletes a writable one that has changed.
    """
    return all(_present_and_good(repo, oid) for oid in _objects(cached))


def _objects(cached: Any) -> Iterator[str]:
    """Yield the ids of a stage's output objects; read a folder's listing only after its check."""
    for out in cached.outs:
        yield out.hash_info.value
        if out.hash_info.isdir:
            yield from (info.value for _, _, info in out.get_obj())


def _present_and_good(repo: "Repo", oid: str) -> bool:
    path = Path(repo.cache.local.oid_to_path(oid))
    if not path.exists():
        return False
    if md5(path) == oid.removesuffix(".dir"):
        return True
    folder = _folder(repo) / QUARANTINE
    folder.mkdir(parents=True, exist_ok=True)
    path.replace(folder / oid)
    _log.warning(
        "stage cache: object %s is corrupt and was moved to %s; the stage runs again", oid, folder
    )
    return False


_ENTRIES = "runs/*/*/*"  # DVC's run cache: a result's entry, named by its key and its content
_OBJECTS = "files/md5/*/*"  # named by their MD5; a folder's listing ends with .dir
_LISTING = ".dir"


def unneeded(cache: Path, workspaces: Iterable[Path], older_than: float) -> list[Path]:
    """Return the files to delete, entries before objects, so no entry names a deleted object.

    An entry stays while a workspace uses all its outputs, or while it is young. An object stays
    while a workspace or a remaining entry names it, or while it is young itself.

    Args:
        cache: The stage cache that all workspaces share.
        workspaces: The workspaces that are kept.
        older_than: A time in seconds since the epoch; files made later are young.
    """
    named = {oid for workspace in workspaces for oid in _held_by(workspace)}
    entries = []
    for path in sorted(cache.glob(_ENTRIES)):
        # The process that wrote it was killed, or a power cut took the content.
        torn = path.name.startswith(".") or not path.stat().st_size
        outputs = set() if torn else set(_hashes(read_yaml(path)["outs"]))
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
    """Delete the `unneeded` files while no stage restores or commits; return their bytes."""
    freed = 0
    with locked(cache, WHOLE, exclusive=True):
        for path in unneeded(cache, workspaces, older_than):
            freed += path.stat().st_size
            path.unlink()
            with suppress(OSError):  # the folder has other files
                path.parent.rmdir()
    return freed


def _held_by(workspace: Path) -> Iterator[str]:
    """Yield the hashes of what the workspace's stages read and wrote, or are going to restore."""
    for told in kept(workspace).values():
        yield from _hashes(told["entry"]["outs"])
    lock = workspace / "dvc.lock"
    if lock.is_file() and lock.stat().st_size:  # a power cut may have emptied it
        for stage in read_yaml(lock)["stages"].values():
            yield from _hashes([*stage.get("deps", []), *stage.get("outs", [])])


def _hashes(files: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    yield from (file["md5"] for file in files if "md5" in file)


def _listed(cache: Path, listing: str) -> Iterator[str]:
    path = cache / "files" / "md5" / listing[:2] / listing[2:]
    if path.is_file():  # a workspace may read a folder that was never in the cache
        yield from (file["md5"] for file in read_json(path))
