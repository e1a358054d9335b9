"""What `penstock bench` compares the pipeline with, on the same Airflow."""

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, Param, chain

from pipelines.orchestration.ray_job import RayJobOperator
from pipelines.run.records import stage_names


def nothing() -> None:
    """As little as a task can do."""


with DAG(dag_id="nothing", schedule=None, doc_md="As many tasks as the pipeline has."):
    chain(
        *[
            PythonOperator(task_id=name, python_callable=nothing)
            for name in ("prepare", *stage_names())
        ]
    )

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
