"""What was told to be there is there after a power cut, which takes what no process synced.

The disk is an ext4 in a file, which the kernel stops to write to at once.
"""

import os

import pytest

from pipelines.core.settings import PROJECT
from pipelines.core.storage import fresh_folder, md5, write_text
from pipelines.datasets import versions
from pipelines.datasets.dataset_publishing import make
from pipelines.recipe.recipe_files import load_recipe
from pipelines.registry import registry
from pipelines.registry.registration import register
from pipelines.run.logbook import Entry, note, read_logbook
from pipelines.run.records import PreprocessRecord, output_folder
from pipelines.run.usage import metered, usage_of
from pipelines.stage_cache.open_workspace import open_workspace
from pipelines.tracking.tracked_run import MODEL_HASH_TAG
from tests.image_disk import image_disk
from tests.unit.datasets.dataset_workspace import make_workspace

TEXT = "the words of a run\n" * 5000


@pytest.fixture
def disk(tmp_path):
    with image_disk(tmp_path, 256) as disk:
        yield disk


@pytest.fixture
def workspace(disk, monkeypatch):
    for variable in ("PENSTOCK_DATASETS_URL", "PENSTOCK_DATASETS_REMOTE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PENSTOCK_HOME", str(disk.place / "home"))
    return make_workspace(disk.place / "run", TEXT)


def test_an_opened_workspace_has_all_files_and_what_was_told_of_its_run(disk):
    recipe = load_recipe("debug")
    run = open_workspace(PROJECT, disk.place / "home", "run", recipe, {"kind": "none"})
    files = {path: md5(path) for path in run.rglob("*") if path.is_file()}
    entry = Entry(kind="start", key="start", stage="train", cause="a test", done="begins")
    note(run, entry)
    with metered(run, "train"):
        pass
    disk.lose_power()
    disk.power_up()
    assert {path: md5(path) for path in files} == files
    assert read_logbook(run) == [entry]
    assert usage_of(run, "train").endings == 1


def test_a_folder_that_took_its_place_is_whole(disk):
    place = disk.place / "folders" / "made"
    with fresh_folder(place) as folder:
        (folder / "inside").mkdir()
        (folder / "inside" / "text").write_text(TEXT)
    disk.lose_power()
    disk.power_up()
    assert (place / "inside" / "text").read_text() == TEXT
    assert list(place.parent.iterdir()) == [place]


def test_a_stage_that_has_its_record_has_its_outputs(disk, workspace):
    write_text(disk.place / "other", "synced, which puts all names of the disk there")
    disk.lose_power()
    disk.power_up()
    dataset = PreprocessRecord.read(workspace).dataset
    folder = output_folder(workspace, "preprocess")
    for shard in (*dataset.train.shards, *dataset.validation.shards):
        assert md5(folder / shard.path) == shard.md5


def test_a_dataset_version_that_was_made_is_whole(disk, workspace):
    os.sync()
    made = make(workspace)
    disk.lose_power()
    disk.power_up()
    (found,) = versions.list_versions()
    assert found == made
    assert list(versions.verify(found)) == []
    assert make(workspace) == made  # the repository takes more


def test_a_model_that_was_registered_is_whole(disk, home, folders, name, mlflow_client):
    store = disk.place / "artifacts"
    experiment = mlflow_client.create_experiment("on a disk", artifact_location=store.as_uri())
    run = mlflow_client.create_run(experiment).info.run_id
    register(folders, name, run, {MODEL_HASH_TAG: "hash"}, "")
    disk.lose_power()
    disk.power_up()
    (version,) = registry.versions_of(name)
    registry.verified_folder(version)
