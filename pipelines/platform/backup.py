"""`penstock backup` and `penstock restore`: a copy of the home, made while runs are at work.

Nothing is stopped. The order makes the copy one that a platform can go on from, as everything is
written before what mentions it:

1. The databases of Airflow and MLflow, each as it is at one moment.
2. The git repository of the dataset versions.
3. Each run's files. They are listed first. What says that a folder is whole was the folder's last
   file, so what it speaks for is on the list, too; it is the last one to be copied, and left out
   if it is gone by then. The newest checkpoint comes first, as the oldest ones are deleted.
4. All other files: models, and the stores of cached results and of datasets, which runs mention.

Paths of the home are in Airflow's and MLflow's tables, so it is restored where it was.
"""

import hashlib
import io
import shutil
import sqlite3
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from pydantic import BaseModel

from pipelines.core.checked_json import read_model
from pipelines.core.errors import UserError
from pipelines.core.formatting import size
from pipelines.core.settings import COLLECTION_LOCK, PORTS_FILE, SECRETS, Settings
from pipelines.core.storage import (
    MARKER,
    alone_or_refused,
    check_new_folder,
    fresh_folder,
    write_json,
)
from pipelines.platform.home_versions import Versions, check_not_later
from pipelines.run.progress import ProgressMeter
from pipelines.run.records import RUN_FILE

PASSPHRASE = "PENSTOCK_BACKUP_PASSPHRASE"  # noqa: S105 (the name of a variable)
_MANIFEST, _FILES, _SECRETS = "backup.json", "home", "secrets.age"
_DATABASES = ("airflow/airflow.db", "mlflow/mlflow.db")
_VERSIONS = "datasets.git"
# What a platform makes anew, or what belongs to one that runs.
_REMADE = {
    *("services", "locks", "bench", "serving", "torchinductor", SECRETS, _VERSIONS, PORTS_FILE),
    *("lock", COLLECTION_LOCK, "airflow/airflow.cfg", "runs/.trash"),
    *(f"{name}{suffix}" for name in _DATABASES for suffix in ("", "-wal", "-shm", "-journal")),
}
_WHOLE = ("record.json", RUN_FILE, MARKER)  # each is the last file of its folder
_PIECE = 1 << 22  # bytes read at a time


class _Entry(BaseModel):
    """A file, a link or an empty folder."""

    bytes: int = 0
    sha256: str | None = None
    link: str | None = None


class _Manifest(Versions):
    """What `backup.json` says."""

    home: str
    made: datetime
    files: dict[str, _Entry]

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.files.values())


def back_up(settings: Settings, to: Path, passphrase: str, meter: ProgressMeter) -> int:
    """Copy the home into a new folder, and return the bytes of the copy.

    Args:
        settings: They name the home.
        to: The folder; `backup.json` is its last file, and lists all others with their hashes.
        passphrase: What encrypts the secrets, by scrypt in age's format.
        meter: Told the bytes that are copied.

    Raises:
        UserError: There is no home, or its databases are on a server; the folder is not new; the
            disk is too small; or `penstock gc` is running.
    """
    home = settings.home
    _check_can_be_made(settings, to)
    # What is on the list must not be deleted.
    refusal = "`penstock gc` is running; wait until it ends"
    no_collection = alone_or_refused(home / COLLECTION_LOCK, refusal)
    with no_collection, fresh_folder(to.absolute()) as folder:
        folder.chmod(0o700)  # what runs keep may be secret, too
        made = copy_files(home, folder / _FILES, meter)
        (folder / _SECRETS).write_bytes(_encrypt(settings.secrets, passphrase))
        facts = {"home": str(home), "made": datetime.now(UTC), "files": made}
        manifest = _Manifest(**facts, **Versions.installed().model_dump())
        write_json(folder / _MANIFEST, manifest.model_dump(mode="json", exclude_none=True))
    return manifest.bytes


def restore(settings: Settings, source: Path, passphrase: str, meter: ProgressMeter) -> int:
    """Make a home from a backup, whole or not at all, and return the bytes of its files.

    Raises:
        UserError: There is no whole backup; a file of it is damaged or missing; it is of another
            home's path or of a later version; the home exists; or the passphrase is wrong.
    """
    manifest = _checked(settings, source)
    secrets = _decrypt(source / _SECRETS, passphrase)
    with fresh_folder(settings.home) as folder:
        _check_space(folder, manifest.bytes)
        done = 0
        # Links come last, so that nothing is written through one.
        for name, entry in sorted(manifest.files.items(), key=lambda each: bool(each[1].link)):
            with suppress(FileNotFoundError):  # told below
                if _copied(source / _FILES / name, folder / name) == entry:
                    done += entry.bytes
                    meter.write(done / 1e6, manifest.bytes / 1e6, "MB")
                    continue
            raise UserError(f"{source / _FILES / name}: damaged or missing; take another backup")
        with tarfile.open(fileobj=io.BytesIO(secrets)) as archive:
            archive.extractall(folder / SECRETS, filter="data")
        (folder / SECRETS).chmod(0o700)
    return manifest.bytes


def copy_files(home: Path, to: Path, meter: ProgressMeter) -> dict[str, _Entry]:
    """Copy all that lasts of a home but its secrets; the order is this module's."""
    for name in _DATABASES:
        if (home / name).is_file():
            _snapshot(home / name, to / name)
    if (home / _VERSIONS).is_dir():
        _clone(home / _VERSIONS, to / _VERSIONS)
    made = _described(to)
    parts = [f"runs/{path.name}" for path in (home / "runs").glob("*")]
    parts += sorted({path.name for path in home.iterdir()} - {"runs"})
    total = sum(_listed(home, parts).values())
    _check_space(to.parent, total)
    done = 0
    for part in parts:
        for name, count in _listed(home, [part]).items():
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                made[name] = _copied(home / name, to / name)
            done += count
            meter.write(done / 1e6, total / 1e6, "MB")
    return made


def _check_can_be_made(settings: Settings, to: Path) -> None:
    home = settings.home
    if settings.database_url:
        raise UserError(
            "PENSTOCK_DATABASE_URL is set: this command copies databases in the home alone; back "
            "up that server by pg_dump, and the home beside it, as docs/cluster.md shows"
        )
    if not (home / _DATABASES[0]).is_file():
        raise UserError(f"{home}: there is no platform's home to back up; set PENSTOCK_HOME")
    check_new_folder(to, "a backup")
    if to.absolute().is_relative_to(home):
        raise UserError(f"{to} is in {home}, which is what is backed up; name another folder")


def _checked(settings: Settings, source: Path) -> _Manifest:
    """Return what a backup says, if this home can be made from it."""
    if not (source / _MANIFEST).is_file():
        raise UserError(f"{source}: it has no {_MANIFEST}, so it is no whole backup")
    manifest = read_model(source / _MANIFEST, _Manifest)
    home = settings.home
    if manifest.home != str(home):
        raise UserError(
            f"{source} is of the home {manifest.home}, whose path is in its databases; restore it "
            f"there: PENSTOCK_HOME={manifest.home}"
        )
    if home.exists() and any(home.iterdir()):
        raise UserError(f"{home} exists already; move it away, so that nothing of it is lost")
    check_not_later(manifest, f"{source} was made with")
    for name in manifest.files:
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise UserError(f"{source / _MANIFEST}: {name} would be written outside the home")
    return manifest


def _snapshot(database: Path, to: Path) -> None:
    """Copy a database of SQLite as it is at one moment; its writers wait for no longer than that.

    In steps, SQLite would begin again each time another process writes.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    with (
        closing(sqlite3.connect(database, timeout=60)) as theirs,
        closing(sqlite3.connect(to)) as ours,
    ):
        theirs.backup(ours)


def _clone(repository: Path, to: Path) -> None:
    """Copy a git repository, its references first, as another process may push to it."""
    command = ["git", "clone", "--quiet", "--mirror", "--no-local", str(repository), str(to)]
    subprocess.run(command, check=True, capture_output=True)
    shutil.copyfile(repository / "config", to / "config")


def _described(folder: Path) -> dict[str, _Entry]:
    """Return what the files below a folder are."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = _hashed(file)
        elif not any(path.iterdir()):
            found[str(path.relative_to(folder))] = _Entry()
    return found


def _listed(home: Path, parts: Iterable[str]) -> dict[str, int]:
    """Return files, links and empty folders of the home with their bytes, as they are copied."""
    found: dict[str, int] = {}

    def add(path: Path) -> None:
        name = str(path.relative_to(home))
        if name in _REMADE:
            return
        with suppress(FileNotFoundError):  # it was deleted meanwhile
            if path.is_symlink() or not path.is_dir():
                found[name] = path.lstat().st_size
            elif not (inside := sorted(path.iterdir(), reverse=True)):
                found[name] = 0
            else:
                for each in sorted(inside, key=lambda each: each.name in _WHOLE):
                    add(each)

    for part in parts:
        add(home / part)
    return found


def _copied(source: Path, to: Path) -> _Entry:
    """Copy a file, a link or an empty folder, and return what it is."""
    to.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        to.symlink_to(source.readlink())
        return _Entry(link=str(source.readlink()))
    if source.is_dir():
        to.mkdir()
        return _Entry()
    with source.open("rb") as file, to.open("wb") as copy:
        found = _hashed(file, copy.write)
    shutil.copystat(source, to)
    return found


def _hashed(file: IO[bytes], write: Callable[[bytes], object] = len) -> _Entry:
    digest, count = hashlib.sha256(), 0
    while piece := file.read(_PIECE):
        digest.update(piece)
        count += len(piece)
        write(piece)
    return _Entry(bytes=count, sha256=digest.hexdigest())


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(f"{folder.parent}: {size(needed)} are needed, and {size(free)} are free")


def _encrypt(secrets: Path, passphrase: str) -> bytes:
    import pyrage

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in sorted(secrets.iterdir()):
            tar.add(path, path.name)
    encrypted: bytes = pyrage.passphrase.encrypt(archive.getvalue(), passphrase)
    return encrypted


def _decrypt(path: Path, passphrase: str) -> bytes:
    import pyrage

    try:
        secrets: bytes = pyrage.passphrase.decrypt(path.read_bytes(), passphrase)
    except FileNotFoundError:
        raise UserError(f"{path}: missing, so this is no whole backup") from None
    except pyrage.DecryptError as error:
        raise UserError(f"{path}: {error}; give the passphrase of the backup") from error
    return secrets
