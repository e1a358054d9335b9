"""Reading one small file of a run or a registered model, without what lies beside it."""

import tempfile
from pathlib import Path, PurePosixPath

from pipelines.tracking import rest
from pipelines.tracking.client import open_client
from pipelines.tracking.run import local_folder


def read_artifact(address: str, path: str) -> str | None:
    """The text of a file in the artifact store; None where it isn't there.

    Args:
        address: Of a run's artifacts or a version's files: a path or a URL.
        path: Of the file, relative to the address.
    """
    if (folder := local_folder(address)) is not None:
        file = folder / path
        return file.read_text(encoding="utf-8") if file.is_file() else None
    open_client()  # sets MLflow's own settings
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    store = get_artifact_repository(address)
    parent = PurePosixPath(path).parent.as_posix()
    beside = store.list_artifacts("" if parent == "." else parent)
    if path not in [each.path for each in beside]:
        return None
    with tempfile.TemporaryDirectory() as folder_name:
        return Path(store.download_artifacts(path, folder_name)).read_text(encoding="utf-8")


def read_run_artifact(run_id: str, path: str) -> str | None:
    """Likewise of a run; None where the run is gone, too."""
    run = rest.run_if_any(run_id)
    return read_artifact(str(run["info"]["artifact_uri"]), path) if run else None
