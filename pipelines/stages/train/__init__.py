"""The stage train: from token shards to a model as a Hugging Face folder."""

from pathlib import Path

from pipelines.stages.stage import Resources, Stage

STAGE = Stage(
    name="train",
    does="Train the decoder with Ray Train, from the last complete checkpoint if there is one.",
    inputs=("preprocess", "validate"),
    run="pipelines.stages.train.train_stage:run",
    publish="pipelines.stages.train:publish",
    resources=Resources.WORKERS,
)


def publish(workspace: Path) -> None:
    """Copy the last metrics of the run that trained this model to the workspace's MLflow run.

    The function is in this module because an Airflow worker, which has no torch, calls it.
    """
    from pipelines.run.records import TrainRecord
    from pipelines.run.workspace import Run
    from pipelines.tracking.run_search import run_of_model
    from pipelines.tracking.tracked_run import copy_final_metrics

    run_id = Run.read(workspace).mlflow_run_id
    origin = run_of_model(TrainRecord.read(workspace).model_hash)
    if run_id and origin:
        copy_final_metrics(origin, run_id)
