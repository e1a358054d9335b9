"""Airflow's configuration file, which makes `airflow` in any shell use the platform's settings.

`python -m pipelines.platform.airflow_config` writes it to AIRFLOW_CONFIG's path, for a container.

Airflow and MLflow keep their tables in files in the home, or in databases of a Postgres server.

A URL holds no password: libpq, the library below the driver, reads ~/.pgpass or PGPASSFILE.
"""

import configparser
import io
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

from pipelines.core.product import DAGS, PRODUCT
from pipelines.core.settings import BROKEN_RECIPES, PROJECT, Settings, load_settings
from pipelines.core.storage import write_text
from pipelines.platform.secrets import airflow_users_path
from pipelines.tracking.lineage_events import NAMESPACE

_LOCAL = "airflow.dag_processing.bundles.local.LocalDagBundle"
_DRIVER = "postgresql+psycopg"  # both synchronous and asynchronous, as Airflow requires


def airflow_database(settings: Settings) -> str:
    """Return SQLAlchemy's URL of Airflow's database."""
    # Seconds to wait for another writer; the default of five is too short for many runs.
    file = f"sqlite:///{settings.home / 'airflow' / 'airflow.db'}?timeout=60"
    return _on_server(settings, "airflow") or file


def mlflow_database(settings: Settings) -> str:
    """Return SQLAlchemy's URL of MLflow's database."""
    return _on_server(settings, "mlflow") or f"sqlite:///{settings.home / 'mlflow' / 'mlflow.db'}"


def _on_server(settings: Settings, name: str) -> str:
    if not settings.database_url:
        return ""
    return urlsplit(settings.database_url)._replace(scheme=_DRIVER, path=f"/{name}").geturl()


def write_airflow_config(settings: Settings) -> None:
    """Write `airflow.cfg`; it holds keys, so only the owner may read it."""
    path = Path(os.environ.get("AIRFLOW_CONFIG") or settings.home / "airflow" / "airflow.cfg")
    write_text(path, airflow_config(settings), mode=0o600)


def airflow_config(settings: Settings) -> str:
    """Return the file's text: four tasks at a time, all on loopback, keys that all parts share."""
    home = settings.home / "airflow"
    database = airflow_database(settings)
    url = f"http://127.0.0.1:{settings.airflow_port}"
    sections: dict[str, dict[str, object]] = {
        "core": {
            "dags_folder": DAGS,
            "plugins_folder": PRODUCT / "pipelines" / "orchestration" / "plugins",
            "lazy_load_plugins": False,  # one plugin must be loaded before the first task
            "executor": "LocalExecutor",
            "parallelism": 4,
            "load_examples": False,
            "fernet_key": _secret(settings, "airflow-fernet"),
            "simple_auth_manager_users": f"{settings.airflow_user}:admin",
            "simple_auth_manager_passwords_file": airflow_users_path(settings),
            "execution_api_server_url": f"{url}/execution/",
        },
        "api": {
            "host": "127.0.0.1",
            "port": settings.airflow_port,
            "base_url": url,
            "workers": 1,
            "secret_key": _secret(settings, "airflow-session"),
        },
        "api_auth": {"jwt_secret": _secret(settings, "airflow-jwt")},
        "database": {"sql_alchemy_conn": database},
        "logging": {"base_log_folder": home / "logs"},
        # What ends is seen, and what comes next started, after a quarter of a second at most, not
        # a second: seven times in each run. An idle scheduler takes some 6 % of a core for it.
        "scheduler": {"scheduler_idle_sleep_time": 0.25},
        # A new or edited DAG file is read within seconds, and the others once a minute, because
        # each reading is a process that takes half a second of a core.
        "dag_processor": {
            "dag_bundle_config_list": json.dumps(_dag_bundles(settings)),
            "refresh_interval": 10,
            "min_file_process_interval": 60,
            "parsing_processes": 1,
            "dag_processor_log_target": "stdout",
        },
        "openlineage": {"namespace": NAMESPACE},  # of tasks, as of data and models
        "usage_data_collection": {"enabled": False},
    }
    if settings.database_url:  # the same driver; Airflow would look for asyncpg
        sections["database"]["sql_alchemy_conn_async"] = database
    return _ini(sections)


def _dag_bundles(settings: Settings) -> list[dict[str, object]]:
    """Return the folders with DAG files: ours, the project's own, and the recipes' errors."""
    broken = settings.home / "airflow" / BROKEN_RECIPES  # made when there is one
    folders = {"dags-folder": DAGS, BROKEN_RECIPES: broken}
    if PROJECT / "dags" != DAGS and (PROJECT / "dags").is_dir():
        folders["project"] = PROJECT / "dags"
    return [
        {"name": name, "classpath": _LOCAL, "kwargs": {"path": str(folder)}}
        for name, folder in folders.items()
    ]


def _secret(settings: Settings, name: str) -> str:
    return (settings.secrets / name).read_text()


def _ini(sections: dict[str, dict[str, object]]) -> str:
    parser = configparser.RawConfigParser()
    for name, options in sections.items():
        # Airflow reads the file with interpolation: a percent sign in a path must be doubled.
        parser[name] = {key: str(value).replace("%", "%%") for key, value in options.items()}
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()


if __name__ == "__main__":
    write_airflow_config(load_settings())
