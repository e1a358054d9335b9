"""New data in, a validated dataset version out, on which `llm_pipeline` starts by itself.

Looks at the source each day. Where it is as it was when the newest version was made, all is
skipped; else the same stages as in `llm_pipeline`, out of the same cache, make version `name@N`.
"""

from datetime import timedelta

from airflow.sdk import DAG, CronTriggerTimetable

from pipelines.orchestration.dataset_refresh import (
    DATASET_VERSION,
    LookOperator,
    PublishOperator,
)
from pipelines.orchestration.stage_task import RETRIES, stage_task
from pipelines.orchestration.trigger_form import trigger_form

with DAG(
    dag_id="data_refresh",
    description="Look for new data; preprocess, validate and publish them as a dataset version",
    schedule=CronTriggerTimetable("0 3 * * *", timezone="UTC", run_immediately=timedelta(0)),
    catchup=False,
    max_active_runs=1,
    params=trigger_form(),
    default_args=RETRIES,
    tags=["penstock"],
    doc_md=__doc__,
):
    prepare = LookOperator(
        task_id="prepare",
        doc_md="Compare the source with the newest version's: nothing new skips the run.",
    )
    preprocess = stage_task("preprocess", doc_md="As in llm_pipeline, and out of its cache.")
    validate = stage_task(
        "validate",
        doc_md="Great Expectations: also against the newest version, whose statistics drift.",
    )
    publish = PublishOperator(
        task_id="publish",
        outlets=[DATASET_VERSION],
        doc_md="Push to the DVC remote, commit, tag `name@N`; its event starts llm_pipeline.",
    )

    prepare >> preprocess >> validate >> publish
