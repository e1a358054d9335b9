"""The whole lineage of a model: what `tracking.lineage` reads from the workspace, and what only the
stages know of: where training ran, its checkpoints, its jobs, its parent, and what all of it cost.
"""

from pathlib import Path
from typing import Any

from pipelines.core.settings import PROJECT
from pipelines.core.storage import read_json
from pipelines.recipe.recipe import Recipe
from pipelines.registry.registry import logged_model_id
from pipelines.run.records import JOBS, MACHINE, TrainRecord, stage_names
from pipelines.run.usage import usage_of
from pipelines.stages.costs import cost
from pipelines.tracking.lineage import lineage
from pipelines.tracking.run_search import run_of_model
from pipelines.tracking.tracked_run import data_docs_address
from pipelines.training.checkpoint.store import CheckpointStore, checkpoints_of


def provenance(recipe: Recipe, workspace: Path) -> dict[str, Any]:
    """What goes with the model as `lineage.json`; what is not known is null or missing.

    Of a stage out of the cache there is no job and no cost here: they are in the lineage of the
    run that computed it. `trained_by` names that MLflow run.
    """
    facts = lineage(workspace)
    run = facts["run"] or {}
    page = run.get("mlflow_address")
    machine = workspace / MACHINE
    return facts | {
        "data_docs": data_docs_address(page) if page else None,
        "ray_jobs": _ray_jobs(workspace),
        "trained_by": run_of_model(TrainRecord.read(workspace).model_hash),
        "trained_on": read_json(machine) if machine.is_file() else None,
        "checkpoints": _checkpoints(recipe, workspace),
        "parent": _parent(recipe, facts["environment"] or {}),
        "cost": {stage: _cost(recipe, workspace, stage) for stage in stage_names(PROJECT)[:-1]},
    }


def _ray_jobs(workspace: Path) -> dict[str, str]:
    """The submission id of each task's job, the last one where there were several."""
    files = {path.stem: read_json(path) for path in sorted((workspace / JOBS).glob("*.json"))}
    jobs = {task: each.get("submissions") for task, each in files.items()}
    return {task: submissions[-1] for task, submissions in jobs.items() if submissions}


def _checkpoints(recipe: Recipe, workspace: Path) -> dict[str, Any]:
    place = checkpoints_of(recipe, workspace)
    return {"place": place, "steps": CheckpointStore(place).steps()}


def _parent(recipe: Recipe, environment: dict[str, Any]) -> dict[str, Any] | None:
    """The weights that training started from; of a registered model also its id in MLflow."""
    if recipe.model.init_from is None:
        return None
    return {
        "folder": recipe.model.init_from,
        "content": environment.get("init_from"),
        "model_id": logged_model_id(Path(recipe.model.init_from)),
    }


def _cost(recipe: Recipe, workspace: Path, stage: str) -> dict[str, float]:
    used = usage_of(workspace, stage)
    return {
        "seconds": used.seconds,
        "worker_hours": used.worker_hours,
        "gpu_hours": used.gpu_hours,
        "money": cost(used, recipe.resources),
    }
