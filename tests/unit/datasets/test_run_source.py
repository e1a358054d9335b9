"""What a run on a dataset version is made of, and what counts as new."""

import pytest

from pipelines.core.errors import UserError
from pipelines.core.settings import PROJECT
from pipelines.core.storage import read_json, write_json
from pipelines.datasets.dataset_publishing import make
from pipelines.datasets.fetching import fetch_dataset
from pipelines.datasets.run_source import recipe_of, settle, unchanged
from pipelines.datasets.versions import find
from pipelines.recipe.recipe_files import load_recipe, override_values
from pipelines.run.records import PreprocessRecord, output_folder
from pipelines.run.workspace import read_recipe
from pipelines.stage_cache.used_extensions import extension_fingerprints
from tests.team_package import NAME, installed_package
from tests.unit.datasets.dataset_workspace import make_workspace

TEXT = "some text\n" * 40
DVC = PROJECT / "dvc.yaml"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    for variable in ("PENSTOCK_DATASETS_URL", "PENSTOCK_DATASETS_REMOTE"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "home"


def on(label: str, *overrides: str):
    source = ["data.source.kind=dataset", f"data.source.path={label}"]
    return load_recipe("debug", [*source, *overrides])


@pytest.fixture
def workspace(tmp_path):
    made_with = ("data.tokenizer.kind=char", "data.source.text_field=body", "train.steps=7")
    workspace = make_workspace(tmp_path / "run", TEXT, *made_with)
    make(workspace)
    return workspace


def test_a_name_becomes_its_newest_version_and_stays_that(workspace, tmp_path):
    recipe, facts = settle(on("small"))
    assert recipe.data.source.path == "small@1"
    assert facts["dataset"] == "small@1"
    make(make_workspace(tmp_path / "next", TEXT + "more\n"))
    assert settle(recipe) == (recipe, facts)
    assert settle(on("small"))[0].data.source.path == "small@2"


def test_where_the_objects_lie_is_part_of_the_key(workspace, tmp_path, monkeypatch):
    """The record of preprocess says it, and training streams from there."""
    _, here = settle(on("small@1"))
    monkeypatch.setenv("PENSTOCK_DATASETS_REMOTE", str(tmp_path / "moved"))
    _, there = settle(on("small@1"))
    assert here | {"remote": str(tmp_path / "moved")} == there != here


def test_how_data_were_made_is_the_versions_how_they_are_read_the_recipes(workspace):
    asked = on("small@1", "data.sequence_length=32", "data.document_mask=true", "train.steps=9")
    recipe, _ = settle(asked)
    assert recipe.data.tokenizer.kind == "char"
    assert recipe.data.source.text_field == "body"
    assert (recipe.data.source.kind, recipe.data.source.path) == ("dataset", "small@1")
    assert (recipe.data.sequence_length, recipe.data.document_mask) == (32, True)
    assert recipe.train == asked.train


def test_best_fit_samples_keep_the_length_they_were_packed_to(tmp_path):
    packed = ("data.packing=best_fit", "data.sequence_length=48")
    make(make_workspace(tmp_path / "run", TEXT, *packed))
    recipe, _ = settle(on("small@1", "data.sequence_length=32"))
    assert (recipe.data.packing, recipe.data.sequence_length) == ("best_fit", 48)


def test_a_version_starts_the_recipe_that_made_it_on_itself(workspace):
    recipe = recipe_of(find("small@1"))
    made_with = read_recipe(workspace)
    assert recipe.train.steps == 7
    assert recipe.data.source.path == "small@1"
    source = {"data.source.kind": "dataset", "data.source.path": "small@1"}
    assert recipe == override_values(made_with, source)


def test_a_source_of_text_is_fingerprinted_as_ever(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    recipe = load_recipe(
        "debug", ["data.source.kind=files", f"data.source.path={tmp_path / 'a.txt'}"]
    )
    settled, facts = settle(recipe)
    assert settled == recipe
    assert [found["path"] for found in facts["source"]["inputs"]] == ["a.txt"]


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        ((), True),
        (("train.steps=9", "data.document_mask=true", "data.reader=mmap", "name=other"), True),
        (("data.tokenizer.kind=byte",), False),
        (("data.pii.action=report",), False),
    ],
)
def test_what_makes_data_differ_is_news(workspace, overrides, same):
    keys = dict(override.split("=") for override in overrides)
    recipe = override_values(read_recipe(workspace), keys)
    source = read_json(workspace / "source.json")
    assert unchanged(find("small@1"), recipe, source, DVC) is same


def test_a_byte_of_the_source_is_news(workspace):
    source = read_json(workspace / "source.json")
    source["source"]["inputs"][0]["md5"] = "0" * 32
    assert not unchanged(find("small@1"), read_recipe(workspace), source, DVC)


def test_a_changed_extension_is_news(tmp_path):
    package = tmp_path / "package"
    with installed_package(package):
        named = 'data.filters.extensions=[{"name": "quiet"}]'
        workspace = make_workspace(tmp_path / "run", TEXT, named)
        recipe, source = read_recipe(workspace), read_json(workspace / "source.json")
        write_json(workspace / "environment.json", {"extensions": extension_fingerprints(recipe)})
        make(workspace)
        assert unchanged(find("small@1"), recipe, source, DVC)
        with (package / NAME / "filters.py").open("a") as file:
            file.write("\n")
        assert not unchanged(find("small@1"), recipe, source, DVC)


def test_the_stage_fetches_instead_of_making(workspace, tmp_path, home):
    recipe, facts = settle(on("small"))
    run = tmp_path / "train"
    write_json(run / "source.json", facts)
    (run / "outputs/preprocess").mkdir(parents=True)
    (run / "outputs/preprocess/leftover").touch()
    record = fetch_dataset(recipe, run)
    assert PreprocessRecord.read(run) == record
    assert (record.dataset.name, record.dataset.version) == ("small", 1)
    assert record.dataset.remote == str(home / "dataset-store")
    made, fetched = (output_folder(each, "preprocess") for each in (workspace, run))
    names = {path.relative_to(made) for path in made.rglob("*")}
    assert {path.relative_to(fetched) for path in fetched.rglob("*")} == names
    assert (run / "progress.jsonl").read_text().count("files of small@1 fetched") >= 1


def test_a_streamed_version_has_another_key_and_no_shards(workspace, tmp_path):
    recipe, facts = settle(on("small", "data.reader=object_store"))
    assert facts != settle(on("small"))[1]
    fetch_dataset(recipe, tmp_path / "train")
    tokens = tmp_path / "train/outputs/preprocess/tokens"
    assert {path.suffix for path in tokens.iterdir()} == {".idx"}


def test_a_tag_that_was_moved_since_the_run_began_is_refused(workspace, tmp_path):
    recipe, facts = settle(on("small"))
    run = tmp_path / "train"
    write_json(run / "source.json", facts | {"directory_hash": "other.dir"})
    with pytest.raises(UserError, match="small@1 is another than when this run began"):
        fetch_dataset(recipe, run)


def test_a_dataset_that_is_not_there_is_one_line():
    with pytest.raises(UserError, match="no dataset is named 'nosuch'"):
        settle(on("nosuch@1"))
