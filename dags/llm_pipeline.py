"""Text in, a registered and evaluated language model out: five stages, one after the other.

Each stage is a folder of `pipelines/stages`, whose `STAGE` says where it runs; its inputs,
parameters and outputs stand in `dvc.yaml`. Where none of them changed, it comes out of the cache.
"""

from datetime import timedelta

from airflow.sdk import DAG, AssetOrTimeSchedule, CronTriggerTimetable

from pipelines.orchestration.approval import RegisterOperator
from pipelines.orchestration.dataset_refresh import DATASET_VERSION
from pipelines.orchestration.deadline import deadline
from pipelines.orchestration.stage_task import RETRIES, PrepareOperator, stage_task
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
    preprocess = stage_task("preprocess")
    validate = stage_task("validate")
    train = stage_task("train")
    evaluate = stage_task("evaluate")
    register = RegisterOperator()

    prepare >> preprocess >> validate >> train >> evaluate >> register
    temporary_nodes(train, evaluate, after=validate)
