"""OpenLineage's events of a run, as its own client writes them, against its published schema.

The schemas in openlineage/ are OpenLineage's own (github.com/OpenLineage/OpenLineage, Apache 2.0).
"""

import json
import time
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from referencing import Registry, Resource

from pipelines.core.storage import write_json, write_text
from pipelines.recipe.recipe_files import dump_yaml, load_recipe
from pipelines.run.records import DatasetRef, ModelRef, PreprocessRecord, RegisterRecord, Split
from pipelines.run.usage import metered
from pipelines.run.verdict import Verdict
from pipelines.stages.stage import find_stage
from pipelines.tracking import lineage_events

SCHEMAS = [json.loads(path.read_text()) for path in Path(__file__).parent.glob("openlineage/*")]
FACETS = {  # as events name them, and the definitions of their schemas
    "version": "DatasetVersionDatasetFacet",
    "parent": "ParentRunFacet",
    "errorMessage": "ErrorMessageRunFacet",
    "processing_engine": "ProcessingEngineRunFacet",
    "tags": "TagsRunFacet",  # the client's own version
}
STAGES = ("preprocess", "validate", "register")


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """Reads what was sent."""
    file = tmp_path / "events.jsonl"
    for name, value in {"TYPE": "file", "LOG_FILE_PATH": str(file), "APPEND": "true"}.items():
        monkeypatch.setenv(f"OPENLINEAGE__TRANSPORT__{name}", value)
    return lambda: [json.loads(line) for line in file.read_text().splitlines()]


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
    with metered(folder, "preprocess"):
        dataset = DatasetRef(vocab_size=257, train=split, validation=split)
        PreprocessRecord(dataset=dataset, stats={}).write(folder)
    return folder


def register(folder, decision="promoted"):
    with metered(folder, "register"):
        verdict = Verdict(decision=decision, reason="better", candidate_bits_per_byte=2.0)
        RegisterRecord(verdict=verdict, model=ModelRef(name="m", version=4)).write(folder)


def stages(*names):
    return {name: find_stage(name).inputs for name in names}


def validated(events):
    registry = Registry().with_resources(
        (schema["$id"], Resource.from_contents(schema)) for schema in SCHEMAS
    )
    by_definition = {name: schema["$id"] for schema in SCHEMAS for name in schema["$defs"]}
    main = by_definition["RunEvent"]
    for event in events:
        form = {"registry": registry, "format_checker": FormatChecker()}
        Draft202012Validator({"$ref": main}, **form).validate(event)
        datasets = [*event["inputs"], *event["outputs"]]
        for facets in (event["run"]["facets"], *(each["facets"] for each in datasets)):
            for name, facet in facets.items():
                reference = f"{by_definition[FACETS[name]]}#/$defs/{FACETS[name]}"
                Draft202012Validator({"$ref": reference}, **form).validate(facet)
    return events


def versions(datasets):
    return {each["name"]: each["facets"]["version"]["datasetVersion"] for each in datasets}


def test_a_dataset_version_a_model_version_and_its_alias_are_one_chain(workspace, sent):
    with metered(workspace, "train"):
        pass
    register(workspace)
    order = stages("preprocess", "train", "register")
    lineage_events.send(lineage_events.run_events(workspace, "ours", "COMPLETE", None, order))
    promotion = ModelRef(name="m", version=4)
    lineage_events.send(lineage_events.promotion_events(promotion, "promote"))
    events = validated(sent())
    ends = {event["job"]["name"]: event for event in events if event["eventType"] != "START"}
    assert versions(ends["ours.preprocess"]["inputs"]) == {"dataset/web": "3"}
    (made,) = versions(ends["ours.preprocess"]["outputs"]).items()
    read = versions(ends["ours.train"]["inputs"])
    assert (made[0], read["model/base"]) == ("debug/preprocess", "7")
    assert read[made[0]] == made[1]
    assert versions(ends["ours.register"]["outputs"])["model/m"] == "4"
    assert versions(ends["promote.m"]["inputs"]) == {"model/m": "4"}
    assert versions(ends["promote.m"]["outputs"]) == {"model/m@champion": "4"}
    parent = ends["ours.train"]["run"]["facets"]["parent"]
    assert parent["run"]["runId"] == ends["ours"]["run"]["runId"]
    assert parent["job"] == {"namespace": "penstock", "name": "ours", "facets": {}}


def test_a_stage_that_failed_says_why_and_made_nothing(workspace, sent):
    with pytest.raises(KeyError), metered(workspace, "validate"):
        raise KeyError
    order = stages("preprocess", "validate", "train")
    lineage_events.send(lineage_events.run_events(workspace, "ours", "FAIL", "too short", order))
    events = validated(sent())
    ends = {event["job"]["name"]: event for event in events if event["eventType"] != "START"}
    kinds = {name: event["eventType"] for name, event in ends.items()}
    assert kinds == {"ours": "FAIL", "ours.preprocess": "COMPLETE", "ours.validate": "FAIL"}
    failed = ends["ours.validate"]
    assert failed["run"]["facets"]["errorMessage"]["message"] == "too short"
    assert not failed["outputs"]


def test_a_published_version_is_made_of_what_preprocess_made(workspace, sent):
    lineage_events.send(lineage_events.publication_events("web@4", workspace, "ours.refresh"))
    _, end = validated(sent())
    assert versions(end["outputs"]) == {"dataset/web": "4"}
    assert list(versions(end["inputs"])) == ["debug/preprocess"]


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


def test_a_catalogue_that_is_down_costs_a_warning(workspace, monkeypatch, caplog):
    assert not lineage_events.configured()
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:9")
    assert lineage_events.configured()
    began = time.monotonic()
    lineage_events.send(lineage_events.publication_events("web@4", workspace, "ours"))
    assert "OpenLineage did not take an event" in caplog.text
    assert time.monotonic() - began < 60
