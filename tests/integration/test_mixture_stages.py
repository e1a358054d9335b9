"""A training on two dataset versions by weight, through the real stages."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash, read_json
from pipelines.datasets.dataset_publishing import make
from pipelines.datasets.run_source import settle
from pipelines.loading.sampler import mixed_samples
from pipelines.loading.token_dataset import TokenDataset
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_recipe
from pipelines.run.records import PreprocessRecord, TrainRecord, output_folder
from pipelines.stages.evaluate import evaluation
from pipelines.stages.preprocess import preprocessing
from pipelines.stages.train import train_stage
from pipelines.stages.validate import data_gate
from pipelines.tracking.lineage import lineage
from tests.integration.test_dataset_stages import home, lines_about, open_folder, publish

__all__ = ["home"]  # a fixture
SHARED = "this text is in both of them, and held out of each or of none"


@pytest.fixture(scope="module")
def versions(home):
    web = publish(home, "web", [*lines_about("page"), SHARED])
    code = publish(home, "code", [*lines_about("function", 12), SHARED], "data.dedup.kind=minhash")
    return web, code


def ask(mixture: str = "{web: 0.7, code: 0.3}", *overrides: str) -> Recipe:
    source = ["data.source.kind=mixture", f"data.source.mixture={mixture}"]
    return load_recipe("debug", [*source, "train.steps=6", "train.checkpoint_every=3", *overrides])


def open_mixture(folder: Path, *overrides: str) -> tuple[Recipe, Path]:
    """A run on the mixture up to its training."""
    recipe, source = settle(ask("{web: 0.7, code: 0.3}", *overrides))
    workspace = open_folder(folder, recipe, source)
    preprocessing.run(recipe, workspace)
    data_gate.run(recipe, workspace)
    return recipe, workspace


@pytest.fixture(scope="module")
def run(versions, tmp_path_factory):
    recipe, workspace = open_mixture(tmp_path_factory.mktemp("runs") / "whole")
    train_stage.run(recipe, workspace)
    evaluation.run(recipe, workspace)
    return recipe, workspace


def test_versions_and_whole_weights_are_settled_before_the_run(versions):
    recipe, source = settle(ask())
    web, code = versions
    assert recipe.data.source.weights == {"code@1": 3, "web@1": 7}
    assert [(each["dataset"], each["weight"]) for each in source["mixture"]] == [
        ("code@1", 3),
        ("web@1", 7),
    ]
    hashes = [each["directory_hash"] for each in source["mixture"]]
    assert hashes == [code.directory_hash, web.directory_hash]
    assert settle(ask("{code@1: 30, web@1: 70}")) == (recipe, source)
    assert settle(ask("{web: 0.6, code: 0.4}"))[1] != source


def test_each_version_lies_whole_in_its_folder_and_the_record_is_of_all(run, versions):
    _, workspace = run
    dataset = PreprocessRecord.read(workspace).dataset
    output = output_folder(workspace, "preprocess")
    assert dataset.label == "code@1=3, web@1=7"
    for part, version in zip(dataset.mixture, reversed(versions), strict=True):
        assert part.data == version.recipe["data"]
        own = PreprocessRecord.model_validate(read_json(output / part.folder / "record.json"))
        assert own.dataset.directory_hash == part.directory_hash == version.directory_hash
        assert folder_hash(output / part.folder / "tokenizer") == folder_hash(output / "tokenizer")
    for split in ("train", "validation"):
        together = getattr(dataset, split)
        apart = [getattr(version.dataset, split) for version in reversed(versions)]
        assert together.tokens == sum(each.tokens for each in apart)
        assert [shard.md5 for shard in together.shards] == [
            shard.md5 for each in apart for shard in each.shards
        ]


def test_what_is_trained_on_is_of_each_by_its_weight(run):
    """Each ten samples are three of one and seven of the other, as their tokens show."""
    recipe, workspace = run
    record = PreprocessRecord.read(workspace).dataset
    folder = output_folder(workspace, "preprocess")
    dataset = TokenDataset(folder, record.train, 64, mixture=record.mixture)
    assert dataset.mixture is not None
    code, _ = dataset.mixture.totals
    drawn = mixed_samples(recipe.seed, 0, 0, 1, 40, dataset.mixture)
    ranges = dataset.tokens(drawn)
    of_code = [
        record.train.shards[shard].path.startswith("datasets/code@1/") for shard in ranges.files
    ]
    assert (drawn < code).tolist() == of_code
    assert np.reshape(of_code, (4, 10)).sum(axis=1).tolist() == [3, 3, 3, 3]


def cut(metrics) -> None:
    if metrics.step == 4:  # each second is reported
        raise InterruptedError


@pytest.mark.parametrize("reader", ["auto", "object_store"])
def test_a_run_cut_midway_and_one_that_streams_end_in_the_same_model(run, tmp_path, reader):
    """The last checkpoint is after step 3: inside a cycle of ten samples."""
    recipe, workspace = open_mixture(tmp_path / "again", f"data.reader={reader}")
    with pytest.raises(InterruptedError):
        train_stage.run(recipe, workspace, cut)
    again = train_stage.run(recipe, workspace)
    assert again.model_hash == TrainRecord.read(run[1]).model_hash
    shards = list((workspace / "outputs/preprocess").rglob("*.bin"))
    assert bool(shards) == (reader == "auto")


def test_each_version_is_validated_by_the_recipe_that_made_it(run):
    _, workspace = run
    results = read_json(workspace / "outputs/validate/record.json")["results"]
    checks = {each["check"] for each in results}
    of_each = {
        f"{label}@1: {name}"
        for label in ("web", "code")
        for name in ("documents", "texts", "shards", "splits")
    }
    assert checks == of_each | {"mixture"}


def test_held_out_documents_of_each_are_scored_once(run):
    import pyarrow.parquet as pq

    _, workspace = run
    record = read_json(workspace / "outputs/evaluate/record.json")
    ids = pq.read_table(workspace / "outputs/evaluate/scores.parquet")["doc_id"].to_pylist()
    assert len(set(ids)) == len(ids) == record["documents"]
    assert set(record["datasets"]) == {"web@1", "code@1"}
    low, high = sorted(record["datasets"].values())
    assert low <= record["bits_per_byte"] <= high


def test_lineage_names_all_versions_with_their_weights(run):
    parts = lineage(run[1])["records"]["preprocess"]["dataset"]["mixture"]
    assert [(each["name"], each["version"], each["weight"]) for each in parts] == [
        ("code", 1, 3),
        ("web", 1, 7),
    ]
    json.dumps(parts)


def test_a_mixture_is_not_published_again(run):
    with pytest.raises(UserError, match="of versions already, code@1=3, web@1=7"):
        make(run[1])


def test_a_leak_from_one_training_split_to_the_other_held_out_is_named(home, versions, tmp_path):
    """Held out is a document by its hash: where other fractions are, not in both."""
    publish(home, "leaky", lines_about("page"), "data.validation_fraction=0.5")
    recipe, source = settle(ask("{web: 1, leaky: 1}"))
    workspace = open_folder(tmp_path / "run", recipe, source)
    preprocessing.run(recipe, workspace)
    with pytest.raises(UserError, match=r"mixture: .*doc_id.*the same as an earlier row"):
        data_gate.run(recipe, workspace)
    lines = (workspace / "outputs/validate/quarantine.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["check"] for row in rows} == {"mixture"}
    assert all(row["excerpt"].startswith("page ") for row in rows)


@pytest.mark.parametrize(
    ("overrides", "difference"),
    [
        (["data.tokenizer.kind=bpe", "data.tokenizer.vocab_size=300"], "vocabulary size"),
        (["data.packing=best_fit"], "packing"),
    ],
)
def test_versions_that_one_model_cannot_read_are_refused(home, versions, overrides, difference):
    name = difference.split()[0]
    publish(home, name, lines_about("word"), *overrides)
    with pytest.raises(UserError, match=rf"{name}@1 and web@1 differ in their {difference} \("):
        settle(ask(f"{{web: 1, {name}: 1}}"))


def test_another_tokenizer_of_the_same_size_is_refused(home, versions):
    for name in ("one", "two"):
        publish(
            home,
            name,
            lines_about(name),
            "data.tokenizer.kind=bpe",
            "data.tokenizer.vocab_size=300",
        )
    with pytest.raises(UserError, match=r"one@1 and two@1 differ in their tokenizer"):
        settle(ask("{one: 1, two: 1}"))


def test_one_version_twice_is_refused(versions):
    with pytest.raises(UserError, match="names web@1 twice"):
        settle(ask("{web: 1, web@1: 2}"))
