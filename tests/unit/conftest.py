"""A real MLflow store in SQLite, made once a session: its migrations take three seconds."""

import pytest

EXPERIMENT = "unit"


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory):
    from pipelines.tracking.client import open_client

    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    open_client(uri).create_experiment(EXPERIMENT, artifact_location=str(folder / "artifacts"))
    return uri


@pytest.fixture
def mlflow_client(mlflow_uri, monkeypatch):
    from pipelines.tracking.client import open_client

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    return open_client()


@pytest.fixture
def mlflow_run(mlflow_client):
    """The id of a fresh run."""
    experiment = mlflow_client.get_experiment_by_name(EXPERIMENT)
    return mlflow_client.create_run(experiment.experiment_id).info.run_id
