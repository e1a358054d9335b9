"""MLflow's own client, whose import takes seconds: what has none to spare speaks by `rest`."""

import os
from typing import TYPE_CHECKING

from pipelines.core.settings import load_settings

if TYPE_CHECKING:
    from mlflow import MlflowClient

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Some 13 s in all: a person waits (MLflow's own default goes on for four minutes).
    RETRIES: "3",
}
# Two minutes, for a stage, whose work is worth waiting for: a server is restarted meanwhile.
PATIENT = {RETRIES: "6"}


def open_client(url: str | None = None) -> "MlflowClient":
    """A client of the tracking server and registry at `url`, or where the settings say.

    A request that fails is retried for some 13 s, in a stage for two minutes, and then raises
    MlflowException.
    """
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from mlflow import MlflowClient

    return MlflowClient(url or load_settings().mlflow_url)
