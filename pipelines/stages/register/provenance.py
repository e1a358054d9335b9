"""The whole lineage of a model: what `tracking.lineage` reads from the workspace, and what only the
stages know: where training ran, its checkpoints, its jobs, its parent, and the cost of each stage.
"""

from pathlib import Path
from typing import Any

from pipelines.core.storage import read_json
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.section import registered_label
from pipelines.registry import registry
from pipelines.run.records import JOBS, MACHINE, TrainRecord, stage_names
from pipelines.run.usage import usage_of
from pipelines.stages.costs import cost
from pipelines.tracking.lineage import lineage
from pipelines.tracking.run_search import run_of_model
from pipelines.tracking.tracked_run import data_docs_address
from pipelines.training.checkpoint.store import CheckpointStore, checkpoints_of, copies_of


def provenance(recipe: Recipe, workspace: Path) -> dict[str, Any]:
    """Return the content of the model's `lineage.json`; unknown values are null or missing.

    A stage whose outputs came from the cache has no job and no cost here: they are in the lineage
    of the run that computed it. `trained_by` names the MLflow run that trained the model.
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
        "cost": {stage: _cost(recipe, workspace, stage) for stage in stage_names()[:-1]},
    }


def _ray_jobs(workspace: Path) -> dict[str, str]:
    """Return the submission id of each task's job, or of the last one if there were several."""
    files = {path.stem: read_json(path) for path in sorted((workspace / JOBS).glob("*.json"))}
    jobs = {task: each.get("submissions") for task, each in files.items()}
    return {task: submissions[-1] for task, submissions in jobs.items() if submissions}


def _checkpoints(recipe: Recipe, workspace: Path) -> dict[str, Any]:
    place = checkpoints_of(recipe, workspace)
    facts: dict[str, Any] = {"place": place, "steps": CheckpointStore(place).steps()}
    if copies := copies_of(recipe, workspace):
        facts["copies"] = copies
    return facts


def _parent(recipe: Recipe, environment: dict[str, Any]) -> dict[str, Any] | None:
    """Return the weights that training started from, and the adapters that it went on from."""
    if recipe.model.init_from is None:
        return None
    facts = _start(recipe.model.init_from, environment.get("init_from"))
    if recipe.adapter.init_from is None:
        return facts
    return facts | {"adapter": _start(recipe.adapter.init_from, environment.get("adapter"))}


def _start(start: str, content: str | None) -> dict[str, Any]:
    """Return a registered model, or a folder."""
    facts: dict[str, Any] = {"content": content}
    if label := registered_label(start):
        folder = registry.verified_folder(registry.named(label))
        return facts | {"model": label, "model_id": registry.logged_model_id(folder)}
    return facts | {"folder": start, "model_id": registry.logged_model_id(Path(start))}


def _cost(recipe: Recipe, workspace: Path, stage: str) -> dict[str, float]:
    used = usage_of(workspace, stage)
    return {
        "seconds": used.seconds,
        "worker_hours": used.worker_hours,
        "gpu_hours": used.gpu_hours,
        "money": cost(used, recipe.resources),
    }
