"""The reconciler beside an Airflow of another team, whose DAG knows nothing of Penstock."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from airflow.sdk.exceptions import TaskDeferred

from pipelines.core.machine import free_port
from pipelines.core.settings import load_settings
from pipelines.platform.airflow_api import AirflowApi
from pipelines.platform.environment import BIN
from tests.airflow_server import api_server
from tests.conftest import FOREIGN
from tests.own_dag import OWN_DAG
from tests.unit.orchestration.fake_ray import FakeRay

WATCHER, ADA = "watcher", "ada"  # who may read, and who may do anything


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a team's Airflow that runs, with `own` as its only DAG."""
    site = tmp_path_factory.mktemp("site")
    for name in ("dags", "jobs", WATCHER, ADA):
        (site / name).mkdir()
    (site / "dags" / "own.py").write_text(OWN_DAG.replace("/srv/jobs", str(site / "jobs")))
    passwords = {name: secrets.token_hex() for name in (WATCHER, ADA)}
    for name, password in passwords.items():
        (site / name / "airflow-password").write_text(password)
    (site / "users.json").write_text(json.dumps(passwords))
    port = free_port()
    settings = {
        "AIRFLOW_HOME": site / "airflow",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": port,
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(64),
        "AIRFLOW__CORE__DAGS_FOLDER": site / "dags",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": site / "users.json",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{WATCHER}:viewer,{ADA}:admin",
    }
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {name: str(value) for name, value in settings.items()}
    for command in (["db", "migrate"], ["dags", "reserialize"]):
        subprocess.run([BIN / "airflow", *command], env=environment, check=True)
    with pytest.MonkeyPatch.context() as patch, api_server(url, environment, site):
        for variable in FOREIGN:
            patch.delenv(variable, raising=False)
        patch.setenv("PENSTOCK_AIRFLOW_URL", url)
        patch.setenv("PENSTOCK_HOME", str(site / "shared"))
        yield site


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    ray = FakeRay()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray.url)
    yield ray
    ray.stop()


@pytest.fixture
def reconciler(site: Path, ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As the docs start it, by a user who may only read; returns its log."""
    monkeypatch.setenv("PENSTOCK_AIRFLOW_USER", WATCHER)
    monkeypatch.setenv("PENSTOCK_SECRETS", str(site / WATCHER))
    log = site / "reconciler.log"
    command = [sys.executable, "-m", "pipelines.platform.reconciler"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=site, stdout=output, stderr=output)
    yield log
    process.kill()
    process.wait()


@pytest.fixture
def ada(site: Path, monkeypatch: pytest.MonkeyPatch) -> AirflowApi:
    """A client of a user of that Airflow."""
    with monkeypatch.context() as patch:
        patch.setenv("PENSTOCK_AIRFLOW_USER", ADA)
        patch.setenv("PENSTOCK_SECRETS", str(site / ADA))
        return AirflowApi(load_settings())


def submitted(ada: AirflowApi, ray: FakeRay, run_id: str) -> str:
    """The job of a run's task, which the operator submitted before it deferred."""
    ada.trigger("own", run_id, {})
    names: dict[str, object] = {}
    exec(OWN_DAG, names)
    names["count"].working_dir = None
    task = ada.task("own", run_id, "count", -1)
    ti = SimpleNamespace(
        dag_id="own",
        run_id=run_id,
        task_id="count",
        map_index=-1,
        try_number=1,
        max_tries=task["max_tries"],
        start_date=datetime.now(UTC),
        xcom_push=lambda **_: None,
    )
    with pytest.raises(TaskDeferred) as handed_over:
        names["count"].execute({"ti": ti})
    return handed_over.value.trigger.submission_id


def mark(ada: AirflowApi, run: str, state: str) -> httpx.Response:
    path = f"/api/v2/dags/own/dagRuns/{run}/taskInstances/count"
    return ada._client.patch(path, json={"new_state": state})


def clear(ada: AirflowApi, run: str, _: str) -> httpx.Response:
    asked = {"dag_run_id": run, "task_ids": ["count"], "only_failed": False, "dry_run": False}
    return ada._client.post("/api/v2/dags/own/clearTaskInstances", json=asked)


@pytest.mark.long
@pytest.mark.parametrize(("act", "what"), [(mark, "failed"), (mark, "success"), (clear, "cleared")])
def test_a_job_ends_with_its_task_and_not_before(
    act: Callable[..., httpx.Response], what: str, ada, ray, reconciler, site
) -> None:
    job = submitted(ada, ray, f"run-{what}")
    passed = site / "shared" / "services" / "reconciled"
    for _ in range(2):
        seen = passed.stat().st_mtime if passed.exists() else 0
        wait_until(lambda seen=seen: passed.exists() and passed.stat().st_mtime > seen, reconciler)
    assert ray.jobs[job]["status"] == "RUNNING"
    act(ada, f"run-{what}", what).raise_for_status()
    wait_until(lambda: ray.jobs[job]["status"] == "STOPPED", reconciler)
    (line,) = reconciler.read_text().splitlines()
    name = f"stopping {job}: task count of own run-{what} "
    assert line.endswith(f"{name}is {what}" if act is mark else f"{name}was cleared")


def wait_until(came: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + 60
    while not came():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
