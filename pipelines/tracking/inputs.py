"""The data of a run as MLflow's own dataset inputs, by which its pages filter and link runs."""

import json

from pipelines.core.records import DatasetRef
from pipelines.tracking import rest

_DIGEST_LENGTH = 36  # MLflow's limit


def log_dataset(run_id: str, dataset: DatasetRef, source: str, source_hash: str) -> None:
    """Name both splits as inputs of a run; asked again, MLflow keeps one of each.

    Args:
        run_id: MLflow's.
        dataset: What was trained and evaluated on.
        source: What the data is called where it has no version: a recipe's source.
        source_hash: Its content, likewise.
    """
    splits = {"training": dataset.train, "validation": dataset.validation}
    inputs = []
    for context, split in splits.items():
        place = {"remote": dataset.remote, "git_revision": dataset.git_revision, "split": context}
        profile = {"documents": split.documents, "bytes": split.bytes, "tokens": split.tokens}
        described = {
            "name": f"{dataset.label or source}/{context}",  # name and digest: MLflow's identity
            "digest": (dataset.directory_hash or source_hash)[:_DIGEST_LENGTH],
            "source_type": "dvc" if dataset.label else "penstock",
            "source": json.dumps(place),
            "profile": json.dumps(profile),
        }
        tag = {"key": "mlflow.data.context", "value": context}
        inputs.append({"tags": [tag], "dataset": described})
    rest.log_inputs(run_id, inputs)
