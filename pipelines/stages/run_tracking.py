"""The MLflow run of a workspace: opened before the first stage, closed after the last."""

from collections.abc import Mapping
from pathlib import Path

from pipelines.run.workspace import Run, read_recipe


def open_tracking(
    workspace: Path, parent: Path | None = None, more_tags: Mapping[str, str] | None = None
) -> str:
    """Start the workspace's MLflow run, keep its id in `run.json`, and return its page.

    A second call finds the same run by its `penstock.dag_run_id` tag. If `parent` is given, MLflow
    shows the run below that workspace's run.
    """
    from pipelines.tracking.run_search import addresses
    from pipelines.tracking.tracked_run import DAG_RUN_TAG, DATASET_TAG, PARENT_TAG, start_run

    run, recipe = Run.read(workspace), read_recipe(workspace)
    tags = {
        DAG_RUN_TAG: run.dag_run_id,
        "penstock.git_commit": run.git_commit,
        "penstock.dirty": str(run.dirty).lower(),
        "penstock.recipe": recipe.name,
        "penstock.recipe_fingerprint": run.recipe_fingerprint,
        **(more_tags or {}),
    }
    if parent and (parent_run := Run.read(parent).mlflow_run_id):
        tags[PARENT_TAG] = parent_run
    if recipe.data.source.is_published:
        tags[DATASET_TAG] = recipe.data.source.published_label
    run_id = start_run(recipe.name, run.dag_run_id, tags, recipe.to_dict())
    page, artifacts = addresses(run_id)
    facts = {"mlflow_run_id": run_id, "mlflow_address": page, "mlflow_artifacts": artifacts}
    run.model_copy(update=facts).write(workspace)
    return page


def close_tracking(workspace: Path, status: str) -> None:
    """End the workspace's MLflow run, if it has one, as `FINISHED` or `FAILED`."""
    from pipelines.tracking.tracked_run import end_run

    if run_id := Run.read(workspace).mlflow_run_id:
        end_run(run_id, status)
