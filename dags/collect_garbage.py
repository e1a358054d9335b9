"""What old runs left is deleted once a day, by the rules of `penstock gc`; its log says what.

The DAG begins paused: switch it on in Airflow. `PENSTOCK_GC_CRON` sets other times. Where another
`penstock gc` or a backup is at work, the task waits twenty minutes and tries again.
"""

import shlex
import sys
from datetime import timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, CronTriggerTimetable

from pipelines.core.settings import load_settings
from pipelines.orchestration.stage_task import RETRIES
from pipelines.recipe.schedule_section import COLLECTION_DAG

with DAG(
    dag_id=COLLECTION_DAG,
    description="Delete what old runs left, by the rules of `penstock gc`",
    schedule=CronTriggerTimetable(load_settings().gc_cron, timezone="UTC"),
    is_paused_upon_creation=True,
    catchup=False,
    max_active_runs=1,
    default_args=RETRIES | {"owner": "penstock", "retry_delay": timedelta(minutes=20)},
    tags=["penstock"],
    doc_md=__doc__,
) as dag:
    BashOperator(
        task_id="gc",
        bash_command=f"{shlex.quote(sys.executable)} -m pipelines.cli gc --delete",
        retry_exponential_backoff=False,
        doc_md="Exit code 2, with one line, if Airflow or MLflow does not answer.",
    )
