"""Which version a run of llm_pipeline trains on, by Airflow's own record of what started it."""

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from airflow.sdk.api.datamodels._generated import AssetReferenceAssetEventDagRun
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.execution_time.comms import AssetEventDagRunReferenceResult
from airflow.sdk.execution_time.context import TriggeringAssetEventsAccessor

from pipelines.core.errors import UnreachableError, UserError
from pipelines.orchestration.dataset_refresh import (
    DATASET_VERSION,
    LookOperator,
    triggering_version,
)
from pipelines.orchestration.trigger_form import mistakes_fail_the_task
from pipelines.recipe.recipe_files import RESOLVED, load_recipe


def event(label: str, minute: int) -> AssetEventDagRunReferenceResult:
    asset = AssetReferenceAssetEventDagRun(
        name=DATASET_VERSION.name, uri=DATASET_VERSION.uri, extra={}
    )
    return AssetEventDagRunReferenceResult(
        asset=asset,
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
    context = {"dag_run": SimpleNamespace(conf=conf, run_id="r"), "params": {}}
    with pytest.raises(AirflowFailException, match=told):
        LookOperator(task_id="prepare").execute(context)
