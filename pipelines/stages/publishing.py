"""What a cached stage tells MLflow: nothing ran, so its results are taken from its outputs.

`python -m pipelines.stages.publishing STAGE`, from the workspace.
"""

import sys
from pathlib import Path

from pipelines.run.records import TrainRecord
from pipelines.run.workspace import Run

PUBLISHED = ("validate", "train", "evaluate")


def publish_cached(workspace: Path, stage: str) -> None:
    """Log a restored stage's results to the workspace's MLflow run."""
    match stage:
        case "validate":
            from pipelines.stages.validate.data_gate import publish

            publish(workspace)
        case "train":
            _publish_train(workspace)
        case "evaluate":
            from pipelines.stages.evaluate.evaluation import publish

            publish(workspace)


def _publish_train(workspace: Path) -> None:
    from pipelines.tracking.run_search import run_of_model
    from pipelines.tracking.tracked_run import copy_final_metrics

    run_id = Run.read(workspace).mlflow_run_id
    origin = run_of_model(TrainRecord.read(workspace).model_hash)
    if run_id and origin:
        copy_final_metrics(origin, run_id)


if __name__ == "__main__":
    publish_cached(Path.cwd(), sys.argv[1])
