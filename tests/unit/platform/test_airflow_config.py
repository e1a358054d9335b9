"""airflow.cfg: read back with interpolation, as Airflow reads it."""

import configparser
import json
import stat
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT, load_settings
from pipelines.platform.airflow_config import write_airflow_config
from pipelines.platform.secrets import ensure_secrets


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "100% of it"
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    monkeypatch.setenv("PENSTOCK_AIRFLOW_PORT", "18081")
    monkeypatch.setenv("PENSTOCK_AIRFLOW_USER", "ada")
    settings = load_settings()
    ensure_secrets(settings)
    write_airflow_config(settings)
    return home / "airflow" / "airflow.cfg"


def test_every_value_comes_back(path: Path) -> None:
    parser = configparser.ConfigParser()
    parser.read(path)
    assert parser["core"]["dags_folder"] == str(PROJECT / "dags")
    assert parser["core"]["executor"] == "LocalExecutor"
    assert parser["core"]["parallelism"] == "4"
    assert parser["api"]["host"] == "127.0.0.1"
    assert parser["api"]["base_url"] == "http://127.0.0.1:18081"
    database = parser["database"]["sql_alchemy_conn"]
    assert database == f"sqlite:///{path.parent / 'airflow.db'}?timeout=60"


def test_the_one_user_is_who_penstock_logs_in_as(path: Path) -> None:
    parser = configparser.ConfigParser()
    parser.read(path)
    assert parser["core"]["simple_auth_manager_users"] == "ada:admin"
    users = json.loads(Path(parser["core"]["simple_auth_manager_passwords_file"]).read_text())
    assert users == {"ada": load_settings().airflow_password_path.read_text()}


def test_it_is_the_owners_and_its_keys_last(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_text()
    settings = load_settings()
    ensure_secrets(settings)
    write_airflow_config(settings)
    assert path.read_text() == before
