"""One setting moves Airflow and MLflow to Postgres, and no password is ever in it."""

import configparser
from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.platform.airflow_config import (
    airflow_config,
    airflow_database,
    mlflow_database,
    write_airflow_config,
)
from pipelines.platform.environment import server_variables
from pipelines.platform.secrets import ensure_secrets

SERVER = "postgresql://penstock@db.example:5433?sslmode=verify-full"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_DATABASE_URL", raising=False)
    return tmp_path


def test_files_of_the_home_are_the_default(home: Path) -> None:
    settings = load_settings()
    assert airflow_database(settings).startswith(f"sqlite:///{home}/airflow/airflow.db")
    assert mlflow_database(settings) == f"sqlite:///{home}/mlflow/mlflow.db"


def test_a_server_has_a_database_for_each(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", SERVER)
    settings = load_settings()
    ensure_secrets(settings)
    parser = configparser.ConfigParser()
    parser.read_string(airflow_config(settings))
    options = parser["database"]
    expected = "postgresql+psycopg://penstock@db.example:5433/airflow?sslmode=verify-full"
    assert options["sql_alchemy_conn"] == options["sql_alchemy_conn_async"] == expected
    variables = server_variables(settings, home)
    assert variables["MLFLOW_BACKEND_STORE_URI"] == expected.replace("/airflow?", "/mlflow?")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://penstock:hunter2@db.example",
        "postgresql://penstock:@db.example",
        "postgresql://db.example?user=penstock&password=hunter2",
    ],
)
def test_a_password_is_refused_and_not_repeated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)
    with pytest.raises(UserError, match="PGPASSFILE") as refused:
        load_settings()
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["mysql://db.example", "db.example", "postgresql://", "postgresql://db.example/other"]
)
def test_anything_else_is_one_clear_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)
    with pytest.raises(UserError, match="not a Postgres server"):
        load_settings()


def test_secrets_and_airflows_file_may_lie_elsewhere(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SECRETS", str(home / "mounted"))
    monkeypatch.setenv("AIRFLOW_CONFIG", str(home / "container" / "airflow.cfg"))
    settings = load_settings()
    ensure_secrets(settings)
    write_airflow_config(settings)
    text = (home / "container" / "airflow.cfg").read_text()
    assert (home / "mounted" / "airflow-fernet").read_text() in text
    assert not (home / "airflow").exists()
