"""From new data to the run that trains on them, by Airflow's own record of what started it."""

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from airflow.sdk.api.datamodels._generated import AssetReferenceAssetEventDagRun
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.execution_time.comms import AssetEventDagRunReferenceResult
from airflow.sdk.execution_time.context import (
    OutletEventAccessors,
    TriggeringAssetEventsAccessor,
)

from pipelines.core.errors import UnreachableError, UserError
from pipelines.orchestration import trigger_form
from pipelines.orchestration.dataset_refresh import (
    DATASET_VERSION,
    PUBLISHED,
    LookOperator,
    PublishOperator,
    dataset_asset,
    triggering_version,
)
from pipelines.orchestration.recipe_dags import recipe_dags, refresh_dags
from pipelines.orchestration.stage_task import _recipe
from pipelines.orchestration.trigger_form import mistakes_fail_the_task
from pipelines.recipe import recipe_files
from pipelines.recipe.recipe_files import RESOLVED, load_recipe
from tests.unit.datasets.dataset_workspace import make_workspace


def event(label: str, minute: int, asset=DATASET_VERSION) -> AssetEventDagRunReferenceResult:
    return AssetEventDagRunReferenceResult(
        asset=AssetReferenceAssetEventDagRun(name=asset.name, uri=asset.uri, extra={}),
        extra={"dataset": label},
        source_task_id="publish",
        source_dag_id="data_refresh",
        source_run_id="r",
        source_map_index=-1,
        source_aliases=[],
        timestamp=datetime(2026, 1, 1, 0, minute, tzinfo=UTC),
    )


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], None),
        ([event("a@1", 0)], "a@1"),
        ([event("a@2", 5), event("a@1", 0)], "a@2"),
    ],
    ids=["by the clock", "one", "several"],
)
def test_the_newest_event_names_the_version(events, expected, caplog):
    context = {"triggering_asset_events": TriggeringAssetEventsAccessor.build(events)}
    assert triggering_version(context) == expected
    assert not caplog.records


def test_a_version_of_another_dataset_that_is_passed_over_is_named(caplog):
    events = [event("b@1", 0), event("b@2", 1), event("a@7", 2)]
    context = {"triggering_asset_events": TriggeringAssetEventsAccessor.build(events)}
    assert triggering_version(context) == "a@7"
    (record,) = caplog.records
    assert "b@2 was published too" in record.getMessage()


def test_an_event_without_a_version_is_one_line():
    by_hand = event("a@1", 0).model_copy(update={"extra": {}})
    context = {"triggering_asset_events": TriggeringAssetEventsAccessor.build([by_hand])}
    with pytest.raises(UserError, match="names no dataset version"):
        triggering_version(context)


def test_an_outage_is_tried_again_and_a_mistake_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    with pytest.raises(UnreachableError), mistakes_fail_the_task("publish", "run"):
        raise UnreachableError("no answer")
    with pytest.raises(AirflowFailException), mistakes_fail_the_task("publish", "run"):
        raise UserError("fix it")


def test_an_error_that_the_home_takes_no_more_is_told_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file/home"))
    with pytest.raises(AirflowFailException, match="fix it"), mistakes_fail_the_task("look", "run"):
        raise UserError("fix it")


@pytest.mark.parametrize(
    ("override", "remote", "told"),
    [
        ("data.pii.phone_region=XX", "store", "no country has this code"),
        ("seed=1", "text.txt/store", r"PENSTOCK_DATASETS_REMOTE: .* can't be written"),
    ],
)
def test_a_refresh_that_can_not_end_well_is_refused(
    override, remote, told, home, tmp_path, monkeypatch
):
    (tmp_path / "text.txt").write_text("some text\n")
    monkeypatch.setenv("PENSTOCK_DATASETS_REMOTE", str(tmp_path / remote))
    files = ("data.source.kind=files", f"data.source.path={tmp_path / 'text.txt'}")
    conf = {RESOLVED: load_recipe("debug", [*files, override]).to_dict()}
    dag_run = SimpleNamespace(dag_id="data_refresh", conf=conf, run_id="r")
    context = {"dag_run": dag_run, "params": {}}
    with pytest.raises(AirflowFailException, match=told):
        LookOperator(task_id="prepare").execute(context)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A recipe that looks for new data and one that waits for them, each with DAGs of its own."""
    for module in (recipe_files, trigger_form):
        monkeypatch.setattr(module, "PROJECT", tmp_path)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    for variable in ("PENSTOCK_DATASETS_URL", "PENSTOCK_DATASETS_REMOTE"):
        monkeypatch.delenv(variable, raising=False)
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "source.yaml").write_text(
        "name: source\ndata: {name: small}\nschedule: {refresh: '@daily'}\n"
    )
    (recipes / "waiting.yaml").write_text(
        "name: waiting\ntrain: {steps: 7, warmup_steps: 0}\nschedule: {dataset: small}\n"
    )
    return tmp_path


def published(workspace):
    """The event that a refresh sends when it has published what is in its workspace."""
    outlets = OutletEventAccessors()
    publish = PublishOperator(task_id="publish", workspace=str(workspace))
    publish.execute({"outlet_events": outlets})
    (sent,) = outlets[PUBLISHED].asset_alias_events
    return sent


def test_a_version_that_a_refresh_makes_starts_the_waiting_recipe_on_itself(project):
    assert "source.refresh" in {dag.dag_id for dag in refresh_dags(None)}
    sent = published(make_workspace(project / "source.refresh__r", "some text\n" * 40))
    dags = {dag.dag_id: dag for dag in recipe_dags(None)}
    waiting = dags["waiting"]
    (awaited,) = waiting.timetable.asset_condition.objects
    assert sent.dest_asset_key.to_asset() == awaited == dataset_asset("small")
    started = [event(sent.extra["dataset"], 0, awaited)]
    recipe = _recipe(
        {
            "triggering_asset_events": TriggeringAssetEventsAccessor.build(started),
            "dag": waiting,
            "dag_run": SimpleNamespace(dag_id="waiting", conf={}),
            "params": waiting.params.dump(),
        }
    )
    assert (recipe.name, recipe.train.steps) == ("waiting", 7)
    assert (recipe.data.source.kind, recipe.data.source.path) == ("dataset", "small@1")


@pytest.mark.parametrize("waiting", [None, "name: other\nschedule: {dataset: small}\n", "name: ["])
def test_a_version_that_no_recipe_waits_for_starts_the_recipe_that_it_was_made_with(
    project, waiting
):
    file = project / "recipes" / "waiting.yaml"
    file.unlink() if waiting is None else file.write_text(waiting)
    sent = published(make_workspace(project / "source.refresh__r", "some text\n" * 40))
    assert sent.dest_asset_key.to_asset() == DATASET_VERSION
    assert sent.extra == {"dataset": "small@1"}
