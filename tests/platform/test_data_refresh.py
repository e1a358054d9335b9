"""New data become a version, and the version a model, through the real Airflow, Ray and MLflow."""

import json
import time
from pathlib import Path

import pytest

from pipelines.core.storage import read_json
from pipelines.platform.airflow_api import AirflowApi
from pipelines.platform.dag_runs import DAG
from pipelines.recipe.recipe_files import RESOLVED, load_recipe
from pipelines.run.records import PreprocessRecord
from pipelines.run.workspace import Run, read_recipe, workspace_path
from tests.conftest import Platform

REFRESH = "data_refresh"
STAGES = ("prepare", "preprocess", "validate", "publish")
MODEL = "penstock-refreshed"
PATIENCE_S = 600
# What a model is asked beside its bits per byte is no matter of the data's way here.
BRIEF = (
    "evaluate.bias.enabled=false",
    "evaluate.safety.documents=0",
    "evaluate.sample_tokens=0",
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(30):
        lines = (f"document {number} has a line {line} of its own" for line in range(40))
        (folder / f"{number:02}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def airflow(platform):
    airflow = AirflowApi(platform.settings)
    for dag in (DAG, REFRESH):
        airflow.wait_for_dag(dag)
        airflow.unpause(dag)
    yield airflow
    pause(airflow, REFRESH)


def pause(airflow: AirflowApi, dag: str) -> None:
    answer = airflow._client.patch(f"/api/v2/dags/{dag}", json={"is_paused": True})
    answer.raise_for_status()


def refresh(platform: Platform, airflow: AirflowApi, run_id: str, source: Path) -> dict[str, str]:
    """Run data_refresh on the folder; the state of each task."""
    overrides = [
        "data.source.kind=files",
        f"data.source.path={source}",
        "data.name=tiny",
        f"register.model_name={MODEL}",
        *BRIEF,
    ]
    recipe = load_recipe("debug", overrides)
    airflow.trigger(REFRESH, run_id, {RESOLVED: recipe.to_dict()})
    state = wait(lambda: over(airflow, REFRESH, run_id))
    assert state == "success", logs(platform, run_id)
    return {name: task["state"] for name, task in airflow.tasks(REFRESH, run_id).items()}


def wait(found):
    began = time.monotonic()
    while (result := found()) is None:
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(1)
    return result


def over(airflow: AirflowApi, dag: str, run_id: str) -> str | None:
    state = airflow.run_state(dag, run_id)
    return state if state in ("success", "failed") else None


def logs(platform: Platform, run_id: str) -> str:
    found = (platform.settings.home / "airflow/logs").rglob("attempt=*.log")
    return "\n".join(f"{log}\n{log.read_text()[-3000:]}" for log in found if run_id in str(log))


def training_on(platform: Platform, label: str) -> str | None:
    """The id of a run of llm_pipeline on a version, once its first task has opened it."""
    for path in platform.settings.runs.iterdir():
        if (path / "run.json").is_file() and read_recipe(path).data.source.path == label:
            return Run.read(path).dag_run_id
    return None


@pytest.fixture(scope="module")
def first(platform, airflow, source):
    """The tasks of the first refresh, and the id of the training that it started."""
    tasks = refresh(platform, airflow, "refresh-1", source)
    run_id = wait(lambda: training_on(platform, "tiny@1"))
    state = wait(lambda: over(airflow, DAG, run_id))
    assert state == "success", logs(platform, run_id)
    return tasks, run_id


def test_a_first_refresh_makes_version_1_that_passed_the_gate(platform, first):
    tasks, _ = first
    assert tasks == dict.fromkeys(STAGES, "success")
    (version,) = json.loads(platform.penstock("data", "list", "tiny", "--json").stdout)
    assert version["label"] == "tiny@1"
    assert version["documents"] == 30
    assert version["validation"]["expectations"] > 10
    assert version["run"]["dag_run_id"] == "data_refresh__refresh-1"
    assert platform.penstock("data", "verify", "tiny@1").returncode == 0


def test_its_event_starts_a_training_on_exactly_that_version(platform, first):
    _, run_id = first
    assert run_id.startswith("asset_triggered__")
    workspace = workspace_path(platform.settings.runs, run_id)
    recipe = read_recipe(workspace)
    assert recipe.registration.model_name == MODEL  # the recipe that the version was made with
    dataset = PreprocessRecord.read(workspace).dataset
    assert (dataset.name, dataset.version) == ("tiny", 1)
    shown = json.loads(platform.penstock("data", "show", "tiny@1", "--json").stdout)
    assert dataset.directory_hash == shown["directory_hash"]
    assert dataset.git_revision == shown["git_revision"]
    assert shown["models"] == [f"{MODEL} version 1"]


def test_the_mlflow_run_names_the_version(platform_variables, first):
    from pipelines.tracking.mlflow_client import open_client

    _, run_id = first
    run = Run.read(workspace_path(platform_variables.settings.runs, run_id))
    tags = open_client().get_run(run.mlflow_run_id).data.tags
    assert tags["penstock.dataset"] == "tiny@1"


def test_nothing_new_skips_and_one_byte_makes_version_2(platform, airflow, source, first):
    pause(airflow, DAG)  # nothing need be trained on version 2
    assert refresh(platform, airflow, "refresh-2", source) == dict.fromkeys(STAGES, "skipped")

    text = source / "07.txt"
    text.write_bytes(b"D" + text.read_bytes()[1:])
    tasks = refresh(platform, airflow, "refresh-3", source)
    assert tasks == dict.fromkeys(STAGES, "success")
    versions = json.loads(platform.penstock("data", "list", "tiny", "--json").stdout)
    assert [version["label"] for version in versions] == ["tiny@1", "tiny@2"]
    workspace = workspace_path(platform.settings.runs, f"{REFRESH}__refresh-3")
    assert read_json(workspace / "previous.json") == versions[0]["stats"]
