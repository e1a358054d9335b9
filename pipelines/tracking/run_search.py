"""Finding runs: by what they made, and on MLflow's pages.

Reading one small file of a run or a registered model, without what lies beside it.
"""

import tempfile
from pathlib import Path, PurePosixPath

from pipelines.core.settings import load_settings
from pipelines.run.records import ModelRef
from pipelines.tracking import rest
from pipelines.tracking.mlflow_client import open_client
from pipelines.tracking.tracked_run import DATASET_TAG, MODEL_HASH_TAG, local_folder


def run_of_model(model_hash: str) -> str | None:
    """Return the run that trained the model with this content, the oldest where several did."""
    found = rest.oldest_run(f"tags.`{MODEL_HASH_TAG}` = '{model_hash}'")
    return str(found["info"]["run_id"]) if found else None


def models_of_dataset(label: str) -> list[ModelRef]:
    """Return the registered model versions that were trained on a dataset version, `name@N`.

    Also on a mixture of which it was a part: `a@1=3, b@2=7`.
    """
    found = open_client().search_model_versions(f"tags.`{DATASET_TAG}` LIKE '%{label}%'")
    versions = [
        ModelRef(name=each.name, version=int(each.version))
        for each in found
        if label in _labels(each.tags[DATASET_TAG])
    ]
    return sorted(versions, key=lambda each: (each.name, each.version))


def _labels(tag: str) -> list[str]:
    return [part.partition("=")[0] for part in tag.split(", ")]


def addresses(run_id: str) -> tuple[str, str]:
    """Return the page of a run, and where its artifacts lie: a path or a URL."""
    info = rest.run(run_id)["info"]
    page = f"{load_settings().mlflow_url}/#/experiments/{info['experiment_id']}/runs/{run_id}"
    return page, str(info["artifact_uri"])


def read_artifact(address: str, path: str) -> str | None:
    """Return the text of a file in the artifact store; None where it isn't there.

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
