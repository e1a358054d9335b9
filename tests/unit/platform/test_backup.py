"""A backup that is made while others write is one that a platform can go on from."""

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from pipelines.core.errors import UserError
from pipelines.core.settings import Settings, load_settings
from pipelines.core.storage import folder_hash, mark_complete, one_at_a_time, write_json
from pipelines.datasets.repository import DatasetRepository
from pipelines.platform import backup
from pipelines.platform.backup import back_up, copy_files, restore
from pipelines.platform.secrets import ensure_secrets
from pipelines.run.progress import ProgressMeter

SECRET = "correct horse battery staple"
FILES = 6  # of a checkpoint, whose deletion falls between two of them
METER = ProgressMeter("backup", lambda progress: None)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of a home of this test's own."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "a home"))
    return filled(load_settings())


def filled(settings: Settings) -> Settings:
    """Make a home with a run, an empty folder, a version of a dataset and both databases."""
    home = settings.home
    ensure_secrets(settings)
    for name in ("airflow/airflow.db", "mlflow/mlflow.db"):
        (home / name).parent.mkdir(parents=True)
        with closing(sqlite3.connect(home / name)) as database, database:
            database.execute("CREATE TABLE models (file TEXT)")
    run = home / "runs" / "a-run"
    write_json(run / "run.json", {"dag_run_id": "a-run"})
    (run / "dvc.lock").write_text("stages: {}\n")
    (run / "link").symlink_to("dvc.lock")
    (run / "outputs" / "empty").mkdir(parents=True)
    checkpoint(run / "checkpoints" / "step-000010")
    (home / "services").mkdir()
    (home / "services" / "airflow.log").write_text("a log")
    DatasetRepository(settings.datasets_url, home / "mirror").publish("text", 1, {"text/a": b"1"})
    return settings


class Lost(NamedTuple):
    """A home that was backed up and then lost."""

    settings: Settings
    home: Path  # where it is now
    copy: Path
    bytes: int


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """Made once: what age makes of a passphrase takes a second by design."""
    folder = tmp_path_factory.mktemp("lost")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_HOME", str(folder / "a home"))
        settings = filled(load_settings())
    copied = back_up(settings, folder / "copy", SECRET, METER)
    return Lost(settings, moved(settings), folder / "copy", copied)


@pytest.fixture
def lost(whole: Lost, tmp_path: Path) -> Iterator[Lost]:
    """With a copy of its own to spoil."""
    shutil.copytree(whole.copy, tmp_path / "copy", symlinks=True)
    yield whole._replace(copy=tmp_path / "copy")
    shutil.rmtree(whole.settings.home, ignore_errors=True)


def checkpoint(folder: Path) -> None:
    """Files of tensors, and then the marker."""
    folder.mkdir(parents=True)
    for number in range(FILES):
        (folder / f"__{number}_0.distcp").write_bytes(folder.name.encode() * 999)
    mark_complete(folder)


def moved(settings: Settings) -> Path:
    """The home is lost; this is where it lies now."""
    lost = settings.home.with_name("lost")
    shutil.move(settings.home, lost)
    return lost


def test_a_restored_home_is_the_lost_one(lost: Lost, tmp_path: Path) -> None:
    settings = lost.settings
    assert restore(settings, lost.copy, SECRET, METER) == lost.bytes
    for name in ("runs", "secrets"):
        assert folder_hash(settings.home / name) == folder_hash(lost.home / name)
    assert (settings.home / "runs/a-run/link").readlink() == Path("dvc.lock")
    assert (settings.home / "runs/a-run/outputs/empty").is_dir()
    assert (settings.home / "secrets").stat().st_mode & 0o777 == 0o700
    assert (settings.home / "secrets/ray-token").stat().st_mode & 0o777 == 0o600
    repository = DatasetRepository(settings.datasets_url, tmp_path / "mirror")
    assert [tag.label for tag in repository.tags()] == ["text@1"]
    assert repository.publish("text", 2, {"text/a": b"2"}) is not None
    assert not (settings.home / "services").exists()
    with pytest.raises(UserError, match="exists already; move it away"):
        restore(settings, lost.copy, SECRET, METER)


def test_no_secret_is_in_the_clear(lost: Lost) -> None:
    secrets = [path.read_bytes().strip() for path in (lost.home / "secrets").iterdir()]
    assert len(secrets) > 5
    for path in (each for each in lost.copy.rglob("*") if each.is_file()):
        assert not [each for each in secrets if each in path.read_bytes()]
    assert lost.copy.stat().st_mode & 0o777 == 0o700


class Writers:
    """Write and delete as a platform does: what is mentioned is there first, and goes last."""

    def __init__(self, home: Path) -> None:
        self._home, self._run = home, home / "runs" / "a-run"
        self._rounds = 0

    def write(self) -> None:
        """Write one of each."""
        self._rounds += 1
        self._checkpoint(self._rounds)
        self._model(self._rounds)
        self._cached(self._rounds)

    def _checkpoint(self, step: int) -> None:
        folder = self._run / "checkpoints" / f"step-{step:06}"
        if not folder.exists():
            checkpoint(folder)
        old = self._run / "checkpoints" / f"step-{step - 2 * FILES:06}"
        (old / "COMPLETE").unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)

    def _model(self, number: int) -> None:
        file = self._home / "mlflow" / "artifacts" / f"{number}.safetensors"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"weights")
        connected = sqlite3.connect(self._home / "mlflow/mlflow.db", timeout=60)
        with closing(connected) as database, database:
            database.execute("INSERT INTO models VALUES (?)", [file.name])

    def _cached(self, number: int) -> None:
        thing = self._home / "dvc-cache" / f"{number}"
        thing.parent.mkdir(exist_ok=True)
        thing.write_text("cached")
        write_json(self._run / "mentions.json", thing.name)


def test_what_is_mentioned_is_there_though_others_write(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each file of a run is copied, others write once."""
    copied, writers = backup._copied, Writers(settings.home)
    writers.write()

    def while_others_write(source: Path, to: Path) -> object:
        if source.is_relative_to(settings.runs):
            writers.write()
        return copied(source, to)

    monkeypatch.setattr(backup, "_copied", while_others_write)
    copy = tmp_path / "copy"
    copy_files(settings.home, copy, METER)
    run = copy / "runs" / "a-run"
    assert whole_checkpoints(run)
    with closing(sqlite3.connect(copy / "mlflow/mlflow.db")) as database:
        models = [name for (name,) in database.execute("SELECT file FROM models")]
    assert models
    assert all((copy / "mlflow/artifacts" / name).is_file() for name in models)
    mentioned = json.loads((run / "mentions.json").read_text())
    assert (copy / "dvc-cache" / mentioned).read_text() == "cached"


@pytest.mark.parametrize("moment", range(FILES + 1))
def test_a_checkpoint_that_is_deleted_meanwhile_is_whole_or_does_not_count(
    moment: int, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, done = backup._copied, []

    def deleting(source: Path, to: Path) -> object:
        if source.parent.name == "step-000010":
            if len(done) == moment:
                (source.parent / "COMPLETE").unlink()
                shutil.rmtree(source.parent)
            done.append(source)
        return copied(source, to)

    monkeypatch.setattr(backup, "_copied", deleting)
    copy_files(settings.home, tmp_path / "copy", METER)
    assert len(done) == FILES + 1
    assert whole_checkpoints(tmp_path / "copy/runs/a-run") == []


@pytest.mark.parametrize("moment", range(FILES + 1))
def test_a_checkpoint_that_is_being_written_does_not_count(
    moment: int, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are listed as far as they are there, and its marker is there by the end."""
    listed, run = backup._listed, settings.runs / "a-run"
    folder = run / "checkpoints" / "step-000020"
    folder.mkdir()
    for number in range(moment):
        (folder / f"__{number}_0.distcp").write_bytes(b"half of it")

    def ending(home: Path, parts: list[str]) -> dict[str, int]:
        found = listed(home, parts)
        if len(parts) == 1 and not (folder / "COMPLETE").exists():
            shutil.rmtree(folder)
            checkpoint(folder)
        return found

    monkeypatch.setattr(backup, "_listed", ending)
    copy_files(settings.home, tmp_path / "copy", METER)
    assert whole_checkpoints(tmp_path / "copy/runs/a-run") == ["step-000010"]


def whole_checkpoints(run: Path) -> list[str]:
    """The names of those that count; each has all its files."""
    markers = list(run.glob("checkpoints/*/COMPLETE"))
    for marker in markers:
        names = {path.name for path in marker.parent.iterdir()}
        assert names == {"COMPLETE", *(f"__{number}_0.distcp" for number in range(FILES))}
        contents = {path.read_bytes() for path in marker.parent.glob("*.distcp")}
        assert contents == {marker.parent.name.encode() * 999}
    return [marker.parent.name for marker in markers]


def cut(copy: Path) -> None:
    (copy / "home/runs/a-run/run.json").write_text("{}")


def missing(copy: Path) -> None:
    (copy / "home/runs/a-run/dvc.lock").unlink()


def without_list(copy: Path) -> None:
    (copy / "backup.json").unlink()


def without_secrets(copy: Path) -> None:
    (copy / "secrets.age").unlink()


def other_secrets(copy: Path) -> None:
    (copy / "secrets.age").write_bytes(b"age-encryption.org/v1\n")


def changed(**changes: object) -> Callable[[Path], None]:
    """What another platform, or somebody who means harm, would have written."""

    def change(copy: Path) -> None:
        facts = json.loads((copy / "backup.json").read_text())
        write_json(copy / "backup.json", facts | changes)

    return change


@pytest.mark.parametrize(
    ("harm", "line"),
    [
        (cut, r"run\.json: damaged or missing; take another backup"),
        (missing, r"dvc\.lock: damaged or missing; take another backup"),
        (without_list, "it has no backup.json, so it is no whole backup"),
        (without_secrets, "secrets.age: missing, so this is no whole backup"),
        (other_secrets, "secrets.age: .*; give the passphrase of the backup"),
        (changed(home="/elsewhere"), "restore it there: PENSTOCK_HOME=/elsewhere"),
        (changed(penstock="99.1"), "was made with penstock 99.1, and .* install the later one"),
        (changed(airflow="99.1"), "was made with airflow 99.1, and .* install the later one"),
        (changed(mlflow="99.1"), "was made with mlflow 99.1, and .* install the later one"),
        (changed(airflow="new"), "backup.json: airflow: .* Invalid version"),
        (changed(files={"../out": {"bytes": 0}}), "../out would be written outside the home"),
        (changed(files=[]), "backup.json: files: "),
    ],
)
def test_a_backup_that_can_t_be_restored_is_one_line_and_no_home(
    harm: Callable[[Path], None], line: str, lost: Lost
) -> None:
    before = {path.name for path in lost.home.parent.iterdir()}
    harm(lost.copy)
    with pytest.raises(UserError, match=line):
        restore(lost.settings, lost.copy, SECRET, METER)
    assert {path.name for path in lost.home.parent.iterdir()} == before


def test_a_wrong_passphrase_is_one_line(lost: Lost) -> None:
    with pytest.raises(UserError, match="give the passphrase of the backup"):
        restore(lost.settings, lost.copy, "another", METER)
    assert not lost.settings.home.exists()


def test_what_can_t_be_backed_up_is_one_line(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"is in .*, which is what is backed up"):
        back_up(settings, settings.home / "copy", SECRET, METER)
    (tmp_path / "file").touch()
    for taken in (settings.home, tmp_path / "file"):
        with pytest.raises(UserError, match="needs a new or an empty folder"):
            back_up(settings, taken, SECRET, METER)
    collecting = one_at_a_time(settings.home / "gc.lock")
    with collecting, pytest.raises(UserError, match="`penstock gc` is running; wait until it ends"):
        back_up(settings, tmp_path / "copy", SECRET, METER)
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", "postgresql://me@host:5432")
    with pytest.raises(UserError, match="back up that server by pg_dump"):
        back_up(load_settings(), tmp_path / "copy", SECRET, METER)
    monkeypatch.delenv("PENSTOCK_DATABASE_URL")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "none"))
    with pytest.raises(UserError, match="there is no platform's home to back up"):
        back_up(load_settings(), tmp_path / "copy", SECRET, METER)
    assert not (tmp_path / "copy").exists()
