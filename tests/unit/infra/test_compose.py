"""The Compose file: read by Compose itself, and held to the settings and to what is secret."""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from pipelines.core.settings import PROJECT, load_settings
from pipelines.platform.airflow_config import mlflow_database
from pipelines.platform.parts import NAMES
from pipelines.platform.secrets import ensure_secrets

FOLDER = PROJECT / "infra" / "compose"
FILE = FOLDER / "docker-compose.yaml"
IMAGES_ENV = (FOLDER / "images.env").read_text()
FILLED = re.sub(r"^(\w+)_DIGEST=$", r"\1_DIGEST=sha256:" + "a" * 64, IMAGES_ENV, flags=re.MULTILINE)
FILLED = FILLED.replace("TAG=\n", "TAG=0.1.0\n")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def read_by_compose(images: str, tmp_path: Any) -> subprocess.CompletedProcess[str]:
    if not shutil.which("docker-compose"):
        pytest.skip("no docker-compose is installed (on Debian: apt-get install docker-compose)")
    (tmp_path / "images.env").write_text(images)
    command = ["docker-compose", "--env-file", tmp_path / "images.env", "--file", FILE, "config"]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


def test_compose_takes_it(compose: dict[str, Any], tmp_path: Any) -> None:
    read = read_by_compose(FILLED, tmp_path)
    assert read.returncode == 0, read.stderr
    services = yaml.safe_load(read.stdout)["services"]
    assert services.keys() == compose["services"].keys()
    assert services["mlflow"]["image"] == "penstock-mlflow:0.1.0"


def test_an_image_that_is_not_pinned_stops_it(tmp_path: Any) -> None:
    read = read_by_compose(IMAGES_ENV, tmp_path)
    assert read.returncode == 1
    assert "Missing mandatory value" in read.stderr


def test_it_has_all_parts_of_the_platform_and_each_says_whether_it_is_well(
    compose: dict[str, Any],
) -> None:
    services = compose["services"]
    assert {name for name in NAMES if name != "ray"} <= services.keys()
    assert "--host=127.0.0.1" in services["postgres"]["healthcheck"]["test"]  # not its first start
    lasting = {name for name, service in services.items() if service.get("restart") != "no"}
    assert {name for name in lasting if "healthcheck" not in services[name]} == {"s3-bucket"}


def test_all_that_listens_outside_is_on_the_loopback(compose: dict[str, Any]) -> None:
    ports = {name: service.get("ports", []) for name, service in compose["services"].items()}
    assert all(port.startswith("127.0.0.1:") for each in ports.values() for port in each)
    assert not ports["ray-head"] + ports["postgres"]


def test_secrets_are_files_and_no_part_has_one_that_it_does_not_name(
    compose: dict[str, Any],
) -> None:
    for name, service in compose["services"].items():
        for variable, value in service.get("environment", {}).items():
            secret = re.search("PASSWORD|TOKEN|SECRET|_KEY", variable)
            assert not secret or str(value).startswith("/"), (name, variable)
    used = {
        secret if isinstance(secret, str) else secret["source"]
        for service in compose["services"].values()
        for secret in service.get("secrets", [])
    }
    assert used == compose["secrets"].keys()
    for name, secret in compose["secrets"].items():
        assert secret == {"file": f"./secrets/{name}"}
    # What signs certificates is Ray's, what opens Airflow is Airflow's.
    by_service = {name: str(s.get("secrets", "")) for name, s in compose["services"].items()}
    assert "ca.key" not in by_service["scheduler"] + by_service["mlflow"]
    assert "airflow" not in by_service["ray-worker"] + by_service["mlflow"]


def test_it_is_the_local_platform_by_other_addresses(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    services = compose["services"]
    airflow = services["scheduler"]["environment"]
    for variable in ("PENSTOCK_HOME", "PENSTOCK_SECRETS"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in airflow.items():
        monkeypatch.setenv(variable, value)
    settings = load_settings()
    assert services["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"] == mlflow_database(
        settings
    )
    assert str(settings.airflow_port) in services["api-server"]["ports"][0]
    assert {f"--port={settings.mlflow_port}", "--workers=1"} <= {*services["mlflow"]["command"]}
    head = services["ray-head"]["command"][2]
    assert f"--port={settings.ray_gcs_port} " in head
    assert f"--dashboard-port={settings.ray_port}" in head
    assert f"127.0.0.1:{settings.ray_port}" in (FOLDER / "../config/nginx.conf").read_text()
    assert services["ray-worker"]["environment"]["MLFLOW_TRACKING_URI"] == settings.mlflow_url
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    ensure_secrets(load_settings())
    needed = {path.name for path in load_settings().secrets.iterdir()} - {"airflow-users.json"}
    assert needed <= {s for s in services["scheduler"]["secrets"] if isinstance(s, str)}
