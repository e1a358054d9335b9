"""Penstock as a provider of Airflow: what it shows, and what its operator needs."""

import importlib
import json
import subprocess
import sys
from importlib.resources import files

import jsonschema
import pytest

from pipelines.orchestration.provider import get_provider_info
from pipelines.orchestration.ray_job import RayJobOperator
from pipelines.orchestration.ray_jobs_hook import RayJobsHook
from tests.own_dag import OWN_DAG

BLOCKED = ("torch", "mlflow", "dvc", "dvc_data", "great_expectations", "ray", "numpy")


def test_airflow_knows_the_type_of_connection() -> None:
    from airflow.providers_manager import ProvidersManager

    manager = ProvidersManager()
    assert "penstock" in manager.providers
    assert manager.hooks["ray_jobs"].hook_name == "Ray Jobs"
    form = manager.field_behaviours["ray_jobs"]
    assert form["relabeling"] == {"host": "Dashboard's address", "password": "Token"}


def test_the_metadata_are_what_airflows_schemas_ask_for() -> None:
    info = get_provider_info()
    # What only Airflow's own releases need, of a provider in its repository.
    released = {"state": "ready", "versions": ["0.1.0"], "source-date-epoch": 0}
    for name, said in (("provider_info", info), ("provider.yaml", info | released)):
        schema = json.loads(files("airflow").joinpath(f"{name}.schema.json").read_text())
        jsonschema.validate(said, schema)


@pytest.mark.parametrize(
    ("section", "name"),
    [("operators", "RayJobOperator"), ("triggers", "RayJobTrigger"), ("hooks", "RayJobsHook")],
)
def test_the_metadata_name_the_module_of_each_class(section, name) -> None:
    info = get_provider_info()
    (found,) = info[section]
    assert [found["integration-name"]] == [
        each["integration-name"] for each in info["integrations"]
    ]
    (module,) = found["python-modules"]
    assert getattr(importlib.import_module(module), name).__module__ == module


def test_the_metadata_name_the_links_of_the_operator() -> None:
    from airflow.providers_manager import ProvidersManager

    links = {type(link) for link in RayJobOperator.operator_extra_links}
    names = {f"{link.__module__}.{link.__name__}" for link in links}
    assert {*get_provider_info()["extra-links"]} == names
    assert names <= {*ProvidersManager().extra_links_class_names}


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


def test_the_dag_of_the_docs_is_short_and_is_a_dag() -> None:
    assert len(OWN_DAG.splitlines()) <= 15
    names = {}
    exec(OWN_DAG, names)
    task = names["count"]
    assert (task.retries, task.retry_delay.total_seconds()) == (3, 10)
    assert task.downstream_task_ids == {"done"}


def test_airflows_processes_load_only_what_is_installed() -> None:
    lacking = ("dvc", "numpy")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({lacking!r}))\n"
        "sys.argv.append('scheduler')\n"
        "import pipelines.orchestration.plugins.preload\n"
        "assert 'tenacity' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
