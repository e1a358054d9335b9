"""Penstock as a provider of Airflow: what it shows, and what its operator needs."""

import subprocess
import sys

import pytest

from pipelines.orchestration.provider import get_provider_info
from pipelines.orchestration.ray_jobs_hook import RayJobsHook

BLOCKED = ("torch", "mlflow", "dvc", "dvc_data", "great_expectations", "ray", "numpy")


def test_airflow_knows_the_type_of_connection() -> None:
    from airflow.providers_manager import ProvidersManager

    manager = ProvidersManager()
    assert "penstock" in manager.providers
    assert manager.hooks["ray_jobs"].hook_name == "Ray Jobs"
    assert get_provider_info()["connection-types"][0]["connection-type"] == "ray_jobs"


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("ray-jobs://:secret@10.0.0.1:8265", ("http://10.0.0.1:8265", "secret")),
        ("ray-jobs://https%3A%2F%2Fray.example.org", ("https://ray.example.org", None)),
    ],
)
def test_a_connection_is_an_address_and_a_token(uri, place, monkeypatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_MY_RAY", uri)
    assert RayJobsHook("my_ray").place() == place


def test_a_connection_that_does_not_answer_says_so(monkeypatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_RAY_DEFAULT", "ray-jobs://127.0.0.1:9")
    works, told = RayJobsHook().test_connection()
    assert not works
    assert told.startswith("http://127.0.0.1:9: ")


def test_the_operator_needs_none_of_the_large_libraries() -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r}))\n"
        "from pipelines.orchestration.ray_job import RayJobOperator\n"
        "from pipelines.orchestration.ray_job_trigger import RayJobTrigger\n"
        "RayJobOperator(task_id='train', entrypoint='python train.py')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
