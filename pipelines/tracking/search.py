"""Finding runs: by what they made, and on MLflow's pages."""

from pipelines.core.records import ModelRef
from pipelines.core.settings import load_settings
from pipelines.tracking import rest
from pipelines.tracking.client import open_client
from pipelines.tracking.run import DATASET_TAG, MODEL_HASH_TAG


def run_of_model(model_hash: str) -> str | None:
    """The run that trained the model with this content, the oldest where several did."""
    found = rest.oldest_run(f"tags.`{MODEL_HASH_TAG}` = '{model_hash}'")
    return str(found["info"]["run_id"]) if found else None


def models_of_dataset(label: str) -> list[ModelRef]:
    """The registered model versions that were trained on a dataset version, `name@N`.

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
    """The page of a run, and where its artifacts lie: a path or a URL."""
    info = rest.run(run_id)["info"]
    page = f"{load_settings().mlflow_url}/#/experiments/{info['experiment_id']}/runs/{run_id}"
    return page, str(info["artifact_uri"])
