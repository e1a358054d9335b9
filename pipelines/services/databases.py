"""Where Airflow and MLflow keep their rows: files in the home, or databases of a Postgres server.

A URL holds no password: libpq, the driver below, reads it from ~/.pgpass or PGPASSFILE.
"""

from urllib.parse import urlsplit

from pipelines.core.settings import Settings

_DRIVER = "postgresql+psycopg"  # the one that is synchronous and asynchronous, as Airflow wants


def airflow_database(settings: Settings) -> str:
    """SQLAlchemy's URL of Airflow's database."""
    # Seconds to wait for another writer; the five by default are too few where runs are many.
    file = f"sqlite:///{settings.home / 'airflow' / 'airflow.db'}?timeout=60"
    return _on_server(settings, "airflow") or file


def mlflow_database(settings: Settings) -> str:
    """SQLAlchemy's URL of MLflow's database."""
    return _on_server(settings, "mlflow") or f"sqlite:///{settings.home / 'mlflow' / 'mlflow.db'}"


def _on_server(settings: Settings, name: str) -> str:
    if not settings.database_url:
        return ""
    return urlsplit(settings.database_url)._replace(scheme=_DRIVER, path=f"/{name}").geturl()
