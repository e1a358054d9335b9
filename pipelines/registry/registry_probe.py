"""Asks MLflow, when a run is prepared, for what the run's last stage needs of it hours later."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.core.errors import UnreachableError, UserError, one_line
from pipelines.core.settings import load_settings
from pipelines.core.writable_place import PROBE, check_writable
from pipelines.tracking.mlflow_client import call, call_unless_missing, open_client
from pipelines.tracking.tracked_run import local_folder

_DEFAULT_EXPERIMENT = "0"  # the files of a new experiment will lie beside those of this one
_FIX = "MLFLOW_TRACKING_URI says where MLflow is, and `penstock up` starts it on this machine"
_LOGIN = "fix MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
_NAME = "MLflow's artifact store"
_STORE = "fix the owner or rights of that place, or the keys that open it"


def check_mlflow(experiment: str) -> None:
    """Check that MLflow would register a model, and that its files could be written.

    Args:
        experiment: The name of the run's experiment, which need not be there yet.

    Raises:
        UserError: This user may not, or the artifact store can't be written.
        UnreachableError: A later try may succeed.
    """
    with _one_line():
        _ask_registry()
        address = _artifact_location(experiment)
    if address is None:
        return
    if (folder := local_folder(address)) is not None:
        check_writable(str(folder), _NAME, _STORE)
    elif address.startswith("s3://"):
        check_writable(address, _NAME, _STORE, os.environ.get("MLFLOW_S3_ENDPOINT_URL"))
    else:
        _log_artifact(address)


@contextmanager
def _one_line() -> Iterator[None]:
    import httpx

    url = load_settings().mlflow_url
    try:
        yield
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        passes = status >= 500 or status == httpx.codes.TOO_MANY_REQUESTS
        kind, fix = (UnreachableError, "see its log") if passes else (UserError, _LOGIN)
        raise kind(f"MLflow at {url} answers {status}: {one_line(error)}; {fix}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnreachableError(f"no MLflow at {url}: {one_line(error)}; {_FIX}") from error


def _ask_registry() -> None:
    """Ask for a model without a name: the registry refuses that only of those who may add one."""
    import httpx

    try:
        call("POST", "registered-models/create", {"name": ""}, again=lambda _: False)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.BAD_REQUEST:
            raise


def _artifact_location(experiment: str) -> str | None:
    """Return where the files of an experiment lie, or None if that is not known before its run."""
    import httpx

    found = call_unless_missing("experiments/get-by-name", {"experiment_name": experiment})
    try:
        found = found or call("GET", "experiments/get", {"experiment_id": _DEFAULT_EXPERIMENT})
    except httpx.HTTPStatusError as error:  # somebody deleted it, or keeps it from this user
        if error.response.status_code not in (httpx.codes.NOT_FOUND, httpx.codes.FORBIDDEN):
            raise
        return None
    return str(found["experiment"]["artifact_location"])


def _log_artifact(address: str) -> None:
    """Write by MLflow's own client, whose import takes seconds, as it knows every other store."""
    open_client()  # sets MLflow's own settings
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / PROBE
        file.touch()
        try:
            store = get_artifact_repository(address, tracking_uri=load_settings().mlflow_url)
            store.log_artifact(str(file))
        except (MlflowException, OSError) as error:
            told = f"{_NAME}: {address} can't be written: {one_line(error)}; {_STORE}"
            raise UnreachableError(told) from error
