"""Text in, a registered and evaluated language model out: five stages, one after the other.

Each stage is `pipelines/stages/<name>.py`; its inputs, parameters and outputs stand in `dvc.yaml`.
Where none of them changed, the stage comes out of the cache.
"""

from datetime import timedelta

from airflow.sdk import DAG, AssetOrTimeSchedule, CronTriggerTimetable

from pipelines.core.settings import GPU_POOL
from pipelines.orchestration.approval import RegisterOperator
from pipelines.orchestration.dataset_refresh import DATASET_VERSION
from pipelines.orchestration.deadline import deadline
from pipelines.orchestration.stage_task import (
    RETRIES,
    PrepareOperator,
    RayStageOperator,
    StageOperator,
)
from pipelines.orchestration.temporary_nodes import temporary_nodes
from pipelines.orchestration.trigger_form import trigger_form

with DAG(
    dag_id="llm_pipeline",
    description="Preprocess, validate, train, evaluate and register a language model",
    # Sundays. A plain "@weekly" would also start the week that is past when the DAG is unpaused.
    schedule=AssetOrTimeSchedule(
        timetable=CronTriggerTimetable("0 0 * * 0", timezone="UTC", run_immediately=timedelta(0)),
        assets=[DATASET_VERSION],  # and on each version that data_refresh makes
    ),
    catchup=False,
    max_active_runs=4,
    params=trigger_form(),
    deadline=deadline(),
    default_args=RETRIES,
    tags=["penstock"],
    doc_md=__doc__,
):
    prepare = PrepareOperator(
        task_id="prepare",
        doc_md="Check the recipe, clone the project into the run's workspace, open the MLflow run.",
    )
    preprocess = RayStageOperator(
        task_id="preprocess",
        doc_md="Ray Data: read, normalise, drop duplicates, train the tokenizer, write shards.",
    )
    validate = StageOperator(
        task_id="validate",
        doc_md="Great Expectations: a failing expectation stops the run before a GPU is asked for.",
    )
    train = RayStageOperator(
        task_id="train",
        pool=GPU_POOL,
        doc_md="Ray Train: the decoder, from the last complete checkpoint where there is one.",
    )
    evaluate = RayStageOperator(
        task_id="evaluate",
        pool=GPU_POOL,
        doc_md="Bits per byte on held-out documents, beside n-gram and xz baselines; samples.",
    )
    register = RegisterOperator(
        task_id="register",
        doc_md="Compare with the champion: promote, refuse, ask a person, or leave unchanged.",
    )

    prepare >> preprocess >> validate >> train >> evaluate >> register
    temporary_nodes(train, evaluate, after=validate)
