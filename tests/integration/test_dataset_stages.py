"""A version made by the real stages, and a training on it: fetched, or streamed from the remote."""

from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.core.storage import write_json, write_text
from pipelines.data.reading.source_fingerprint import fingerprint_inputs
from pipelines.datasets.dataset_publishing import make
from pipelines.datasets.run_source import settle
from pipelines.datasets.versions import DatasetVersion
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import dump_yaml, load_recipe
from pipelines.run.records import PreprocessRecord, output_folder
from pipelines.run.workspace import Run
from pipelines.stages.preprocess import preprocessing
from pipelines.stages.train import train_stage
from pipelines.stages.validate import data_gate
from tests.unit.datasets.dataset_workspace import validate as pass_gate


def open_folder(folder: Path, recipe: Recipe, source: dict) -> Path:
    """As `open_workspace`, without the clone."""
    write_text(folder / "params.yaml", dump_yaml(recipe))
    write_json(folder / "source.json", source)
    write_json(folder / "previous.json", {})
    write_json(folder / "environment.json", {"extensions": {"preprocess": {}}})
    run = Run(dag_run_id=folder.name, git_commit="0" * 40, dirty=False, recipe_fingerprint="0")
    run.write(folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_HOME", str(home))
        for variable in ("PENSTOCK_DATASETS_URL", "PENSTOCK_DATASETS_REMOTE"):
            patch.delenv(variable, raising=False)
        yield home


def publish(home: Path, name: str, texts: list[str], *overrides: str) -> DatasetVersion:
    """A version of these documents; the gate, which its users run again, is taken as passed."""
    corpus = home / "corpus" / name
    corpus.mkdir(parents=True)
    for number, text in enumerate(texts):
        (corpus / f"{number:02}.txt").write_text(text)
    source = ["data.source.kind=files", f"data.source.path={corpus}", f"data.name={name}"]
    recipe = load_recipe("debug", [*source, *overrides])
    workspace = open_folder(home / "made" / name, recipe, fingerprint_inputs(recipe.data))
    preprocessing.run(recipe, workspace)
    pass_gate(workspace)
    return make(workspace)


def lines_about(what: str, documents: int = 30) -> list[str]:
    return [
        "\n".join(f"{what} {number} has a line {line} of its own" for line in range(40))
        for number in range(documents)
    ]


@pytest.fixture(scope="module")
def version(home):
    return publish(home, "tiny", lines_about("document"))


def open_training(folder: Path, *overrides: str) -> tuple[Recipe, Path]:
    """A run on the version up to its training, by the stages themselves."""
    on = ["data.source.kind=dataset", "data.source.path=tiny"]
    recipe, source = settle(load_recipe("debug", [*on, "train.steps=4", *overrides]))
    workspace = open_folder(folder, recipe, source)
    preprocessing.run(recipe, workspace)
    data_gate.run(recipe, workspace)
    return recipe, workspace


def test_streamed_and_fetched_shards_train_the_same_model(version, tmp_path):
    models = []
    for reader in ("mmap", "object_store"):
        recipe, workspace = open_training(tmp_path / reader, f"data.reader={reader}")
        dataset = PreprocessRecord.read(workspace).dataset
        assert f"{dataset.name}@{dataset.version}" == version.label
        models.append(train_stage.run(recipe, workspace).model_hash)
    assert not list((tmp_path / "object_store/outputs").rglob("*.bin"))
    assert models[0] == models[1]


def flip_a_byte(path: Path) -> None:
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_one_flipped_byte_of_a_fetched_shard_stops_training_before_a_step(version, tmp_path):
    recipe, workspace = open_training(tmp_path / "run")
    shard = PreprocessRecord.read(workspace).dataset.train.shards[0]
    flip_a_byte(output_folder(workspace, "preprocess") / shard.path)
    with pytest.raises(UserError, match=f"{shard.path}.*damaged"):
        train_stage.run(recipe, workspace)
    assert not (workspace / "outputs/train").exists()
    assert not list((workspace / "checkpoints").glob("step*"))


def test_one_flipped_byte_of_a_streamed_shard_stops_training(version, home, tmp_path):
    recipe, workspace = open_training(tmp_path / "run", "data.reader=object_store")
    md5 = PreprocessRecord.read(workspace).dataset.train.shards[0].md5
    stored = home / "dataset-store/files/md5" / md5[:2] / md5[2:]
    sound = stored.read_bytes()
    flip_a_byte(stored)
    try:
        with pytest.raises(UserError, match="tokens/train"):
            train_stage.run(recipe, workspace)
    finally:
        stored.write_bytes(sound)
    assert not (workspace / "outputs/train").exists()
