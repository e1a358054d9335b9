"""The DAG of `penstock gc` on the platform: what it deleted is in its task's log."""

import os
import time

from pipelines.platform.airflow_api import AirflowApi
from pipelines.platform.garbage_collection import DAY
from pipelines.recipe.schedule_section import COLLECTION_DAG
from tests.processor_time import limit


def test_what_was_deleted_is_in_the_tasks_log(platform):
    airflow = AirflowApi(platform.settings)
    left = platform.settings.runs / "could-not-begin"
    left.mkdir(parents=True)
    (left / "error.json").write_text("{}")
    os.utime(left / "error.json", (time.time() - 10 * DAY,) * 2)
    airflow.wait_for_dag(COLLECTION_DAG)
    assert airflow.unpause(COLLECTION_DAG)  # it began paused
    try:
        airflow.trigger(COLLECTION_DAG, "by-hand", {})
        end = time.monotonic() + limit(120)
        while (state := airflow.run_state(COLLECTION_DAG, "by-hand")) != "success":
            assert state != "failed"
            assert time.monotonic() < end
            time.sleep(1)
    finally:
        paused = {"is_paused": True}
        airflow._client.patch(f"/api/v2/dags/{COLLECTION_DAG}", json=paused).raise_for_status()
    # In the two hours after the DAG's own time, Airflow also makes up for that run as it unpauses.
    ended = [run for run in airflow.runs() if run.dag_id == COLLECTION_DAG and not run.live]
    logs = [airflow.log(COLLECTION_DAG, run.run_id, "gc", 1) for run in ended]
    told = "workspace    could-not-begin: its run could not begin 10 days ago"
    assert any(told in log for log in logs), logs
    assert not left.exists()
