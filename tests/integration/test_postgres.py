"""Airflow and MLflow on a real Postgres, started as the images start them.

It asks for a password, which only a file holds.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipelines.core.machine import free_port
from pipelines.core.settings import PROJECT, load_settings
from pipelines.platform.environment import platform_environment, server_variables
from pipelines.platform.secrets import ensure_secrets
from pipelines.tracking.mlflow_client import open_client
from tests.postgres_server import PostgresServer, postgres_server

pytestmark = pytest.mark.long

FAB = "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager"
IMAGES = PROJECT / "infra" / "images"
PASSWORD = secrets.token_urlsafe()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def environment(server: PostgresServer, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a container that has its secrets as files."""
    mounted = tmp_path / "mounted"
    home, mlflow = tmp_path / "home", free_port()
    for folder in (mounted, home):
        folder.mkdir()
    given = {
        "pgpass": server.pgpass,
        "mlflow-password": PASSWORD,
        "mlflow-session": secrets.token_hex(),
    }
    for name, value in given.items():
        (mounted / name).write_text(value)
        (mounted / name).chmod(0o444)  # as Kubernetes mounts them
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_HOME", str(tmp_path / "shared"))
        patch.setenv("PENSTOCK_DATABASE_URL", server.url)
        patch.setenv("PENSTOCK_SECRETS", str(mounted))
        patch.setenv("PENSTOCK_MLFLOW_PORT", str(mlflow))
        patch.setenv("AIRFLOW_CONFIG", str(home / "airflow.cfg"))
        for variable in ("MLFLOW_TRACKING_URI", "PGPASSFILE"):
            patch.delenv(variable, raising=False)
        settings = load_settings()
        ensure_secrets(settings)
        variables = platform_environment(settings) | server_variables(settings, tmp_path)
    yield variables | {"HOME": str(home)}
    # The password went over the wire and into libpq's own file, and nowhere else.
    holders = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and server.password.encode() in path.read_bytes()
    ]
    assert sorted(path.name for path in holders) == [".pgpass", "pgpass"]


def test_airflow_migrates_and_keeps_its_users_there(
    server: PostgresServer, environment: dict[str, str], tmp_path: Path
) -> None:
    environment |= {"PENSTOCK_PART": "airflow", "AIRFLOW__CORE__AUTH_MANAGER": FAB}
    for _ in range(2):  # the second time it finds all of it
        run(["python", str(IMAGES / "prepare_airflow.py")], environment)
    found = server.rows("airflow", "SELECT username, version_num FROM ab_user, alembic_version")
    assert [name for name, _ in found] == ["admin"]
    assert ("gpu_jobs", 1) in server.rows("airflow", "SELECT pool, slots FROM slot_pool")
    # A probe comes without the entrypoint, and has to look into the same database.
    probe = [shutil.which("airflow", path=environment["PATH"]), "jobs", "check", "--local"]
    ended = subprocess.run(probe, env=environment, capture_output=True, text=True)
    assert "No alive jobs found." in ended.stderr, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert not list(tmp_path.rglob("*.db"))


def run(command: list[str], environment: dict[str, str]) -> None:
    command = [str(IMAGES / "entrypoint.sh"), *command]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


def test_mlflow_keeps_runs_and_people_there(
    server: PostgresServer,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = environment["MLFLOW_TRACKING_URI"]
    command = [IMAGES / "entrypoint.sh", "mlflow", "server", "--app-name=basic-auth", "--workers=1"]
    command += [f"--port={url.rpartition(':')[2]}", "--no-serve-artifacts"]
    log = tmp_path / "server.log"
    counted, metrics = tmp_path / "metrics", free_port()
    environment |= {"PENSTOCK_PART": "mlflow", "prometheus_multiproc_dir": str(counted)}
    with log.open("w") as output:
        process = psutil.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        _wait_for(f"{url}/health", process, log)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/api/2.0/mlflow/experiments/get?experiment_id=0")
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
        run_id = open_client(url).create_run("0").info.run_id
        with shows_metrics(counted, metrics) as answer:
            assert 'mlflow_http_request_total{method="POST",status="200"} 1.0' in answer
        arguments = [
            " ".join(each.cmdline()) for each in (process, *process.children(recursive=True))
        ]
    finally:
        for each in (*process.children(recursive=True), process):
            each.kill()
        process.wait()
    assert server.rows("mlflow", "SELECT run_uuid FROM runs") == [(run_id,)]
    assert server.rows("mlflow", "SELECT username FROM users") == [("admin",)]
    for secret in (server.password, PASSWORD):
        assert secret not in "".join(arguments) + log.read_text()


@contextmanager
def shows_metrics(counted: Path, port: int) -> Iterator[str]:
    """What the container beside MLflow's shows to Prometheus."""
    command = [sys.executable, IMAGES / "mlflow-metrics.py", str(port)]
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(counted)}
    log = counted / "shown.log"
    with log.open("w") as output:
        process = psutil.Popen(command, env=environment, stderr=output)
    try:
        _wait_for(f"http://127.0.0.1:{port}/metrics", process, log)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            yield answer.read().decode()
    finally:
        process.kill()
        process.wait()


def _wait_for(url: str, process: psutil.Popen, log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, OSError):
            assert process.is_running() and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        else:
            return
