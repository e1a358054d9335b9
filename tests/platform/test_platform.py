"""The platform as `penstock up` leaves it. `down` is judged where the session's platform ends."""

import json
import stat
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from ipaddress import ip_address

import psutil
import pytest

from pipelines.core.machine import free_port
from pipelines.core.settings import GPU_POOL
from pipelines.platform.airflow_api import AirflowApi
from tests.conftest import PENSTOCK, Platform


def test_every_socket_listens_on_loopback(platform: Platform) -> None:
    listening = []
    for process in platform.processes():
        with suppress(psutil.NoSuchProcess):  # some come and go
            listening += [
                (process.pid, connection.laddr)
                for connection in process.net_connections(kind="inet")
                if connection.status == psutil.CONN_LISTEN
            ]
    ports = {address.port for _, address in listening}
    assert set(platform.settings.ports.values()) <= ports
    for pid, address in listening:
        host = ip_address(address.ip.removeprefix("::ffff:"))
        assert host.is_loopback, f"process {pid} listens on {address}"


def test_a_second_up_is_quick_and_changes_nothing(platform: Platform) -> None:
    before = _pids(platform)
    seconds = []
    for _ in range(3):  # the best of three: what else the machine does must not decide this
        began = time.monotonic()
        result = platform.penstock("up")
        seconds.append(time.monotonic() - began)
        assert result.returncode == 0, result.stderr
    assert min(seconds) < 2, f"{seconds}\n{result.stdout}"
    assert _pids(platform) == before


def test_status_names_every_part_with_its_log(platform: Platform) -> None:
    result = platform.penstock("status", "--json")
    assert result.returncode == 0, result.stdout
    status = json.loads(result.stdout)
    assert status["ready"]
    assert {part["name"] for part in status["parts"]} == {
        "ray", "mlflow", "api-server", "scheduler", "dag-processor", "triggerer",
        "reconciler",
    }  # fmt: skip
    for part in status["parts"]:
        assert part["state"] == "ready"
        assert part["log"].startswith(str(platform.settings.home))


def test_the_pool_of_gpu_jobs_is_made_once_and_keeps_a_users_size(platform: Platform) -> None:
    airflow = AirflowApi(platform.settings)
    made = airflow.pool_slots(GPU_POOL)
    assert made >= 1
    try:
        airflow.set_pool_slots(GPU_POOL, made + 4)
        assert platform.penstock("up").returncode == 0
        assert airflow.pool_slots(GPU_POOL) == made + 4
        assert _up_with_jobs(platform, str(made + 1)).returncode == 0
        assert airflow.pool_slots(GPU_POOL) == made + 1
        wrong = _up_with_jobs(platform, "many")
        assert wrong.returncode == 2
        assert "PENSTOCK_GPU_JOBS='many' is not a number of jobs" in wrong.stderr
    finally:
        airflow.set_pool_slots(GPU_POOL, made)


def _up_with_jobs(platform: Platform, jobs: str) -> subprocess.CompletedProcess[str]:
    environment = platform.environment | {"PENSTOCK_GPU_JOBS": jobs}
    return subprocess.run([PENSTOCK, "up"], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("token", [None, "wrong"])
def test_ray_refuses_a_request_without_its_token(platform: Platform, token: str | None) -> None:
    request = urllib.request.Request(f"{platform.settings.ray_url}/api/jobs/")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=10)
    assert refusal.value.code == (403 if token else 401)


def test_airflow_lets_admin_in_with_the_password_in_the_file(platform: Platform) -> None:
    password = platform.settings.airflow_password_path.read_text()
    assert _login(platform, "admin", password) == 201
    assert _login(platform, "admin", "wrong") == 401


def test_mlflow_refuses_a_foreign_host_name(platform: Platform) -> None:
    request = urllib.request.Request(f"{platform.settings.mlflow_url}/")
    request.add_header("Host", "evil.example")
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=10)
    assert refusal.value.code == 403


def test_secrets_are_for_the_owner_only_and_shown_nowhere(platform: Platform) -> None:
    settings = platform.settings
    files = [*settings.secrets.iterdir(), settings.home / "airflow" / "airflow.cfg"]
    assert len(files) >= 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(settings.secrets.stat().st_mode) == 0o700
    assert stat.S_IMODE(platform.runtime.stat().st_mode) == 0o700
    values = [path.read_text() for path in settings.secrets.iterdir() if path.suffix != ".json"]
    shown = {f"arguments of {p.pid}": " ".join(p.cmdline()) for p in platform.processes()}
    logs = [
        *settings.home.rglob("*.log"),
        *platform.runtime.rglob("*.log"),
        *platform.runtime.rglob("*.out"),
    ]
    shown |= {str(path): path.read_text(errors="replace") for path in logs if path.is_file()}
    for where, text in shown.items():
        assert not any(value in text for value in values), f"a secret shows in {where}"


def test_a_port_in_use_is_one_line_that_names_the_variable(platform: Platform, tmp_path) -> None:
    port = platform.settings.mlflow_port
    environment = platform.environment | {"PENSTOCK_HOME": str(tmp_path)}
    environment["PENSTOCK_AIRFLOW_PORT"] = str(free_port())
    result = subprocess.run([PENSTOCK, "up"], env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    line = result.stderr.strip().splitlines()[-1]
    assert f"port {port} is in use" in line
    assert "PENSTOCK_MLFLOW_PORT" in line


def _pids(platform: Platform) -> dict[str, int]:
    status = json.loads(platform.penstock("status", "--json").stdout)
    return {part["name"]: part["pid"] for part in status["parts"]}


def _login(platform: Platform, user: str, password: str) -> int:
    request = urllib.request.Request(
        f"{platform.settings.airflow_url}/auth/token",
        data=json.dumps({"username": user, "password": password}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
