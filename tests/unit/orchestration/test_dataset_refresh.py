"""Which version a run of llm_pipeline trains on, by Airflow's own record of what started it."""

from datetime import UTC, datetime

import pytest
from airflow.sdk.api.datamodels._generated import AssetReferenceAssetEventDagRun
from airflow.sdk.execution_time.comms import AssetEventDagRunReferenceResult
from airflow.sdk.execution_time.context import TriggeringAssetEventsAccessor

from pipelines.orchestration.dataset_refresh import DATASET_VERSION, triggering_version


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
def test_the_newest_event_names_the_version(events, expected):
    context = {"triggering_asset_events": TriggeringAssetEventsAccessor.build(events)}
    assert triggering_version(context) == expected
