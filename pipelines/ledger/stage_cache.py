"""The stage cache: DVC's run cache, shared by every workspace.

A stage's key is its command, the content of its deps and its params (`dvc.yaml`). DVC runs nothing
here: a hit checks outputs out, and after a run `commit` records what the stage made.

Any number of runs may do so at once. DVC writes an entry before the objects that it names, and a
reader takes the half of one that another process writes for a broken one, and deletes it: so an
entry is looked up and written under the lock of its stage, and `penstock gc` waits for all of them.
"""

import fcntl
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipelines.core.records import output_folder
from pipelines.core.storage import md5

if TYPE_CHECKING:
    from dvc.repo import Repo

_log = logging.getLogger(__name__)
QUARANTINE = "quarantine"
WHOLE = "whole"  # of the cache: shared by who uses it, exclusive for who deletes from it
_LOCKS = "locks"


def restore(workspace: Path, stage: str) -> bool:
    """Check a stage's outputs out of the cache; False where there is no sound entry.

    Every object is hashed before it is restored. One whose content is not its name is moved to the
    cache's `quarantine` folder, and the stage counts as not cached.
    """
    if _always_changes(workspace, stage):
        return False
    with _open(workspace) as repo:
        with locked(_folder(repo), stage, exclusive=False):
            cached = _lookup(repo, stage)
        if cached is None or not _sound(repo, cached):
            return False
        shutil.rmtree(output_folder(workspace, stage), ignore_errors=True)
        cached.checkout(force=True)
        repo.commit(stage, force=True)
        return True


def commit(workspace: Path, stage: str) -> None:
    """Record a finished stage: its outputs go to the cache, its entry to `dvc.lock`."""
    if _always_changes(workspace, stage):
        return
    with _open(workspace) as repo, locked(_folder(repo), stage, exclusive=True):
        repo.commit(stage, force=True)


def _always_changes(workspace: Path, stage: str) -> bool:
    """Whether its result rests on more than a key can hold, by `dvc.yaml`."""
    stages = yaml.safe_load((workspace / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return bool(stages[stage].get("always_changed"))


@contextmanager
def locked(cache: Path, name: str, *, exclusive: bool) -> Iterator[None]:
    """Wait for and hold a lock of the cache: `name` is a stage, or `WHOLE`."""
    path = cache / _LOCKS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


@contextmanager
def _open(workspace: Path) -> Iterator["Repo"]:
    from dvc.repo import Repo, lock_repo

    with ExitStack() as held:
        # DVC looks names and `dvc.yaml` up in the working directory, whichever repo is opened.
        held.enter_context(chdir(workspace))
        # Without waiting, a second process in this workspace would fail after three seconds.
        repo = held.enter_context(Repo(str(workspace), _wait_for_lock=True))
        held.enter_context(lock_repo(repo))
        held.enter_context(locked(_folder(repo), WHOLE, exclusive=False))
        yield repo


def _folder(repo: "Repo") -> Path:
    return Path(repo.cache.local.path).parent.parent


def _lookup(repo: "Repo", name: str) -> Any | None:
    from dvc.dependency.base import DependencyDoesNotExistError
    from dvc.stage.cache import _get_stage_hash

    # `Repo.stage_cache.restore` trusts an existing dvc.lock before it looks at the deps, and checks
    # no content; so the key is computed from the files, and the entry is loaded, here.
    (stage,) = repo.stage.collect(name)
    try:
        stage.save_deps()
    except DependencyDoesNotExistError:
        return None
    # DVC fails on a key whose only entry it found torn, and deleted.
    folder = Path(repo.stage_cache._get_cache_dir(_get_stage_hash(stage)))
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    entry = repo.stage_cache._load(stage)
    if not entry:
        return None
    return repo.stage_cache._create_stage(entry, wdir=stage.wdir)


def _sound(repo: "Repo", cached: Any) -> bool:
    """Whether each object of the outputs is there and hashes to its name; a bad one is moved.

    DVC trusts an object that is read-only, and deletes one that is not and has changed.
    """
    return all(_present_and_good(repo, oid) for oid in _objects(cached))


def _objects(cached: Any) -> Iterator[str]:
    """Ids of a stage's outputs; a folder's listing comes before, and is read after, its check."""
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
    _log.warning("stage cache: object %s is corrupt; moved to %s, the stage reruns", oid, folder)
    return False
