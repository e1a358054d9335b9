"""The DAG of `penstock gc`: its times, and the command that its task runs."""

import runpy
import subprocess

import pytest
from airflow.sdk import DAG

from pipelines.core.errors import UserError
from pipelines.core.product import DAGS
from pipelines.core.settings import load_settings


def made() -> DAG:
    dag: DAG = runpy.run_path(str(DAGS / "collect_garbage.py"))["dag"]
    return dag


@pytest.mark.parametrize(("given", "times"), [("", "30 3 * * *"), ("@weekly", "0 0 * * 0")])
def test_it_begins_paused_and_runs_at_its_times_one_at_a_time(monkeypatch, given, times):
    monkeypatch.setenv("PENSTOCK_GC_CRON", given)
    dag = made()
    assert dag.timetable.expression == times
    assert dag.is_paused_upon_creation
    assert (dag.max_active_runs, dag.catchup) == (1, False)


def test_its_task_is_the_command_and_fails_where_airflow_does_not_answer(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_AIRFLOW_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/airflow-password").write_text("x")
    (task,) = made().tasks
    done = subprocess.run(
        task.bash_command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: Airflow does not answer at http://127.0.0.1:9")


@pytest.mark.parametrize("text", ["daily", "0 0 31 2 *", "1 2 3"])
def test_what_is_no_cron_is_one_line(monkeypatch, text):
    monkeypatch.setenv("PENSTOCK_GC_CRON", text)
    with pytest.raises(UserError, match=f"^PENSTOCK_GC_CRON='{text}': ".replace("*", r"\*")):
        load_settings()
