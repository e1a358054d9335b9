"""What stages read and made and who became champion, in the names that join them."""

import subprocess
import sys
import time

import pytest

from pipelines.core.storage import write_json, write_text
from pipelines.recipe.recipe_files import dump_yaml, load_recipe
from pipelines.run.records import DatasetRef, ModelRef, PreprocessRecord, RegisterRecord, Split
from pipelines.run.verdict import Verdict
from pipelines.tracking import lineage_events
from tests.unit.tracking.openlineage_schema import file_transport, read_valid, versions


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """Reads what was sent."""
    file = tmp_path / "events.jsonl"
    for name, value in file_transport(file).items():
        monkeypatch.setenv(name, value)
    return lambda: read_valid(file)


@pytest.fixture
def workspace(tmp_path):
    """A run that trained on a version from a registered model, and registered another."""
    folder = tmp_path / "run"
    overrides = [
        "data.source.kind=dataset",
        "data.source.path=web@3",
        "model.init_from=models:/base@7",
    ]
    write_text(folder / "params.yaml", dump_yaml(load_recipe("debug", overrides)))
    facts = {"dag_run_id": "r1", "git_commit": "c0ffee", "dirty": False}
    write_json(folder / "run.json", facts | {"recipe_fingerprint": "f"})
    split = Split(documents=3, bytes=50, tokens=53, shards=())
    dataset = DatasetRef(vocab_size=257, train=split, validation=split)
    PreprocessRecord(dataset=dataset, stats={}).write(folder)
    return folder


def named(datasets):
    return {each.name: each.facets["version"].datasetVersion for each in datasets}


def test_a_dataset_version_a_model_version_and_its_alias_are_one_chain(workspace, sent):
    verdict = Verdict(decision="promoted", reason="better", candidate_bits_per_byte=2.0)
    added = ModelRef(name="m", version=4)
    RegisterRecord(verdict=verdict, model=added).write(workspace)
    assert named(lineage_events.stage_inputs(workspace, "preprocess", ())) == {"dataset/web": "3"}
    (made,) = named(lineage_events.stage_outputs(workspace, "preprocess")).items()
    read = named(lineage_events.stage_inputs(workspace, "train", ("preprocess",)))
    assert read == {made[0]: made[1], "model/base": "7"}
    assert made[0] == "debug/preprocess"
    assert named(lineage_events.stage_outputs(workspace, "register"))["model/m"] == "4"
    lineage_events.announce(added, "promote")
    start, end = sent()
    assert start["run"]["runId"] == end["run"]["runId"]
    assert "parent" not in end["run"]["facets"]
    assert versions(end["inputs"]) == {"model/m": "4"}
    assert versions(end["outputs"]) == {"model/m@champion": "4"}


def test_a_candidate_that_was_refused_is_registered_all_the_same(workspace):
    verdict = Verdict(decision="refused", reason="worse", candidate_bits_per_byte=2.0)
    champion, candidate = ModelRef(name="m", version=3), ModelRef(name="m", version=4)
    RegisterRecord(verdict=verdict, model=champion, candidate=candidate).write(workspace)
    assert named(lineage_events.stage_outputs(workspace, "register"))["model/m"] == "4"


def test_a_stage_that_is_not_over_made_nothing(workspace):
    assert lineage_events.stage_outputs(workspace, "train") == []


@pytest.mark.parametrize(
    ("overrides", "namespace", "name"),
    [
        (["kind=stdlib"], "penstock", "source/python-standard-library"),
        (["kind=files", "path=/corpus/web"], "file", "/corpus/web"),
        (["kind=files", "path=s3://bucket/web"], "s3://bucket", "web"),
        (["kind=huggingface", "path=org/set"], "https://huggingface.co", "datasets/org/set"),
    ],
)
def test_a_source_has_the_name_that_other_tools_give_it(tmp_path, overrides, namespace, name):
    write_json(tmp_path / "source.json", {})
    recipe = load_recipe("debug", [f"data.source.{each}" for each in overrides])
    (found,) = lineage_events._source(tmp_path, recipe.data.source)
    assert (found.namespace, found.name) == (namespace, name)


@pytest.mark.parametrize(
    "variables",
    [
        {
            "OPENLINEAGE__TRANSPORT__TYPE": "http",
            "OPENLINEAGE__TRANSPORT__URL": "http://127.0.0.1:9",
        },
        {"OPENLINEAGE_PARENT_ID": "not a parent"},
    ],
    ids=["down", "set wrongly"],
)
def test_a_catalogue_that_is_down_or_set_wrongly_costs_a_warning(
    sent, monkeypatch, caplog, variables
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    lineage_events.announce(ModelRef(name="m", version=4), "promote")
    assert "OpenLineage did not take an event" in caplog.text
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "variable", ["OPENLINEAGE_URL", "OPENLINEAGE_CONFIG", "OPENLINEAGE__TRANSPORT__TYPE"]
)
def test_each_of_openlineages_own_variables_names_a_catalogue(monkeypatch, variable):
    assert not lineage_events.configured()
    monkeypatch.setenv(variable, "any")
    assert lineage_events.configured()


def test_without_a_transport_nothing_is_sent_and_the_client_is_not_imported():
    code = "import sys; from pipelines.run.records import ModelRef; "
    code += "from pipelines.tracking import lineage_events; "
    code += "lineage_events.announce(ModelRef(name='m', version=4), 'promote'); "
    code += "print('openlineage' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert done.stdout.strip() == b"False"
