"""What Airflow's own provider for OpenLineage sends of a run of our tasks, and what joins it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT
from pipelines.core.storage import write_text
from pipelines.data.reading.source_fingerprint import fingerprint_inputs
from pipelines.orchestration.stage_task import stage_task
from pipelines.orchestration.task_lineage import is_sent
from pipelines.recipe.recipe_files import dump_yaml, load_recipe
from pipelines.stage_cache.open_workspace import open_workspace
from tests.unit.datasets.dataset_workspace import make_workspace
from tests.unit.tracking.openlineage_schema import file_transport, read_valid, versions

# Two members of a sweep, of which the second comes from the stage cache; a stage that fails; a
# dataset version; and a promotion in the child process of a stage's task.
DAG_FILE = '''
import subprocess, sys
from airflow.sdk import DAG
from pipelines.orchestration.dataset_refresh import PUBLISHED, PublishOperator
from pipelines.orchestration.stage_task import StageOperator
from pipelines.stages.stage_process import stage_environment

PROMOTE = """
from pipelines.run.records import ModelRef
from pipelines.tracking import lineage_events
lineage_events.announce(ModelRef(name="m", version=4), "promote")
"""


class Promotion(StageOperator):
    def run_stage(self, workspace):
        environment = stage_environment(workspace) | self._parents
        subprocess.run([sys.executable, "-c", PROMOTE], env=environment, check=True)
        return False


with DAG("ours", schedule=None):
    members = ["{runs}/a", "{runs}/b"]
    StageOperator.partial(task_id="preprocess", doc_md="Text to tokens.").expand(workspace=members)
    StageOperator(task_id="evaluate", workspace="{runs}/a")
    PublishOperator(task_id="publish", workspace="{runs}/published", outlets=[PUBLISHED])
    Promotion(task_id="register", workspace="{runs}/a")
'''


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """What the file transport got from a run of the DAG in a real Airflow."""
    folder = tmp_path_factory.mktemp("lineage")
    recipe = load_recipe("debug", ["data.source.kind=files", f"data.source.path={folder}/corpus"])
    for number in range(20):
        lines = (f"document {number} has a line {line} of its own" for line in range(40))
        write_text(folder / "corpus" / f"{number}.txt", "\n".join(lines))
    for member in "ab":
        open_workspace(PROJECT, folder, member, recipe, fingerprint_inputs(recipe.data))
    make_workspace(folder / "runs/published", "a text of some words " * 20)
    write_text(folder / "airflow/dags/ours.py", DAG_FILE.replace("{runs}", str(folder / "runs")))
    run_in_airflow(folder)
    return read_valid(folder / "events.jsonl")


def run_in_airflow(folder: Path) -> None:
    environment = {name: each for name, each in os.environ.items() if "DATASETS" not in name}
    environment |= file_transport(folder / "events.jsonl")
    environment |= {
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "OPENLINEAGE_NAMESPACE": "company",
        "PENSTOCK_HOME": str(folder),
        "PYTHONPATH": str(PROJECT),
    }
    airflow = Path(sys.prefix) / "bin/airflow"
    for command in (["db", "migrate"], ["dags", "test", "ours"]):
        subprocess.run([airflow, *command], env=environment, capture_output=True, text=True)


def ends(events, job):
    return [each for each in events if each["job"]["name"] == job and each["eventType"] != "START"]


def parent(event):
    return event["run"]["facets"]["parent"]


@pytest.mark.timeout(1200)
def test_a_promotion_in_a_task_has_the_task_as_parent_and_the_run_as_root(events):
    (task,), (promotion,) = ends(events, "ours.register"), ends(events, "promote.m")
    (dag_run,) = ends(events, "ours")
    assert task["producer"] != promotion["producer"]
    assert parent(promotion)["run"]["runId"] == task["run"]["runId"]
    job = parent(promotion)["job"]
    assert (job["namespace"], job["name"]) == ("company", "ours.register")
    for event in (task, promotion):
        root = parent(event)["root"]
        assert root["run"]["runId"] == dag_run["run"]["runId"]
        assert (root["job"]["namespace"], root["job"]["name"]) == ("company", "ours")


@pytest.mark.timeout(1200)
def test_each_member_of_a_sweep_is_a_run_with_what_it_read_and_made(events):
    members = ends(events, "ours.preprocess")
    assert [each["eventType"] for each in members] == ["COMPLETE"] * 2
    assert len({each["run"]["runId"] for each in members}) == 2
    assert len({parent(each)["run"]["runId"] for each in members}) == 1
    (read,) = {each["inputs"][0]["name"] for each in members}
    assert read.endswith("/corpus")
    made = [versions(each["outputs"]) for each in members]
    assert made[0] == made[1]  # the second is the first's, out of the stage cache
    assert made[0].keys() == {"debug/preprocess"}


@pytest.mark.timeout(1200)
def test_a_stage_begins_and_ends_as_it_happens(events):
    job = "ours.preprocess"
    told = [(each["eventType"], each["run"]["runId"]) for each in events if named(each, job)]
    (first, one), (second, same), *_ = told
    assert (first, second, one) == ("START", "COMPLETE", same)
    start = next(each for each in events if named(each, job))
    (end, *_) = ends(events, job)
    assert start["eventTime"] < end["eventTime"]
    assert start["outputs"] == []


def named(event, job):
    return event["job"]["name"] == job


@pytest.mark.timeout(1200)
def test_a_stage_that_failed_says_why_and_made_nothing(events):
    (failed,) = ends(events, "ours.evaluate")
    assert failed["eventType"] == "FAIL"
    assert "is not complete" in failed["run"]["facets"]["errorMessage"]["message"]
    assert failed["outputs"] == []


@pytest.mark.timeout(1200)
def test_a_published_version_is_made_of_what_preprocess_made(events):
    (end,) = ends(events, "ours.publish")
    assert versions(end["outputs"]) == {"dataset/small": "1"}
    assert list(versions(end["inputs"])) == ["debug/preprocess"]


def test_a_stage_on_ray_tells_the_provider_the_same(tmp_path):
    from airflow.providers.openlineage.extractors.base import DefaultExtractor

    workspace = make_workspace(tmp_path, "a text of some words " * 20)
    overrides = ["data.name=small", "model.init_from=models:/base@7"]
    write_text(workspace / "params.yaml", dump_yaml(load_recipe("debug", overrides)))
    extractor = DefaultExtractor(stage_task("train", workspace=str(workspace)))
    read = {each.name for each in extractor.extract().inputs}
    assert {"debug/preprocess", "model/base"} <= read
    assert not extractor.extract_on_failure(None).outputs


def test_without_a_transport_airflow_gets_no_listener(monkeypatch):
    assert not is_sent()
    code = "from airflow.providers.openlineage.plugins import openlineage; import sys; "
    code += "print(openlineage.OpenLineageProviderPlugin.listeners, 'openlineage' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[] False"
