"""The cost of each stage as metrics of the run: seconds, worker-hours, GPU-hours and money.

The points, including their times, are made only from `usage.jsonl`, and MLflow stores equal points
once: so a task that is retried writes no point twice.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.recipe.recipe import Resources
from pipelines.run.records import stage_names
from pipelines.run.usage import Usage, usage_of
from pipelines.run.workspace import Run, read_recipe
from pipelines.stages.plan_check import stage_beside_measured
from pipelines.tracking.curves import Point
from pipelines.tracking.rest import log_points, run_if_any

_METRICS = ("seconds", "worker_hours", "gpu_hours")
TOTAL = "cost/total"  # of all stages, written with the last


def report_costs(workspace: Path, stage: str) -> None:
    """Log the resources that a finished stage used; a stage from the cache used none."""
    if run_id := Run.read(workspace).mlflow_run_id:
        log_points(run_id, list(_points(workspace, stage)))


def _points(workspace: Path, stage: str) -> Iterator[Point]:
    resources = read_recipe(workspace).resources
    used = usage_of(workspace, stage)
    values: dict[str, float] = {f"{key}/{stage}": getattr(used, key) for key in _METRICS}
    if resources.price_per_gpu_hour is not None or resources.price_per_cpu_hour is not None:
        values[f"cost/{stage}"] = cost(used, resources)
        names = stage_names()
        if stage == names[-1]:
            values[TOTAL] = sum(cost(usage_of(workspace, each), resources) for each in names)
    values |= stage_beside_measured(workspace, stage, used.seconds, values.get(f"cost/{stage}"))
    # A stage that a user cleared in Airflow finishes twice; the second point has its own step.
    step = max(0, used.endings - 1)
    for key, value in values.items():
        yield Point(key, value, int(used.last * 1000), step)


def cost(used: Usage, resources: Resources) -> float:
    """Return the cost: a GPU's price includes its worker's CPU, and other workers use a CPU's."""
    gpu_price, cpu_price = resources.price_per_gpu_hour or 0.0, resources.price_per_cpu_hour or 0.0
    return used.gpu_hours * gpu_price + max(0.0, used.worker_hours - used.gpu_hours) * cpu_price


def training_elsewhere(facts: Mapping[str, Any]) -> dict[str, float] | None:
    """Return what training cost the earlier run, if its result came from the stage cache."""
    here, there = (facts.get("run") or {}).get("mlflow_run_id"), facts.get("trained_by")
    if there is None or there == here or (facts.get("cost") or {}).get("train", {}).get("seconds"):
        return None
    run = run_if_any(there)
    if run is None:
        return None
    metrics = {each["key"]: each["value"] for each in run["data"].get("metrics", [])}
    found = {key: metrics.get(f"{key}/train", 0.0) for key in _METRICS}
    return found | {"money": metrics.get("cost/train", 0.0)}
