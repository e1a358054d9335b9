"""What `penstock bench` compares the pipeline with, on the same Airflow."""

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.providers.standard.operators.python import PythonOperator
from airflow.providers.standard.triggers.temporal import DateTimeTrigger
from airflow.sdk import DAG, BaseOperator, Param, chain

from pipelines.orchestration.ray_job import RayJobOperator
from pipelines.run.records import stage_names
from pipelines.stages.stage import Resources, find_stage

WAIT_S = 5  # of a task that waits


def nothing() -> None:
    """As little as a task can do."""


def waits(stage: str) -> bool:
    """Whether the stage's task hands over to the triggerer, until a Ray job is over."""
    return find_stage(stage).resources is not Resources.PROCESS


class Wait(BaseOperator):
    """Waits in Airflow's own trigger, which ends the task.

    Its sensor refuses to be ended so where listeners are, as OpenLineage's is.
    """

    def execute(self, context: Any) -> None:
        moment = datetime.now(UTC) + timedelta(seconds=WAIT_S)
        trigger = DateTimeTrigger(moment, end_from_trigger=True)
        self.defer(trigger=trigger, method_name="execute")


def idle(name: str) -> PythonOperator:
    """What stands for a task of the pipeline."""
    return PythonOperator(task_id=name, python_callable=nothing)


with DAG(dag_id="nothing", schedule=None, doc_md="As many tasks as the pipeline has."):
    chain(*map(idle, ("prepare", *stage_names())))

with DAG(dag_id="waiting", schedule=None, doc_md="As many of them wait as in the pipeline."):
    stages = [Wait(task_id=name) if waits(name) else idle(name) for name in stage_names()]
    chain(idle("prepare"), *stages)

with DAG(
    dag_id="many",
    schedule=None,
    max_active_runs=16,
    params={"workspace": Param("", type="string")},
    doc_md="One Ray job that writes its own name.",
):
    RayJobOperator(
        task_id="job",
        entrypoint='echo "$PENSTOCK_RAY_JOB_ID" >> ../done',
        workspace="{{ params.workspace }}",
    )
