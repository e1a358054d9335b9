"""A real MLflow store in SQLite, made once a session: its migrations take three seconds."""

import pytest

from pipelines.core.storage import write_json
from pipelines.tracking.client import open_client

EXPERIMENT = "unit"


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    open_client(uri).create_experiment(EXPERIMENT, artifact_location=str(folder / "artifacts"))
    return uri


@pytest.fixture
def client(mlflow_uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    return open_client()


@pytest.fixture
def run_id(client):
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return client.create_run(experiment.experiment_id).info.run_id


@pytest.fixture
def workspace(tmp_path, run_id):
    write_json(tmp_path / "run.json", {"mlflow_run_id": run_id, "dag_run_id": "manual__1"})
    return tmp_path
