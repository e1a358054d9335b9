"""What each stage cost, among the metrics of the run: seconds, worker-hours, GPU-hours, money.

The points are made of `usage.jsonl` alone, times included, and MLflow keeps one of several that are
alike: so a task that is tried again writes none twice.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.core.settings import PROJECT
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
    """Log what a finished stage used; a stage out of the cache used nothing."""
    if run_id := Run.read(workspace).mlflow_run_id:
        log_points(run_id, list(_points(workspace, stage)))


def _points(workspace: Path, stage: str) -> Iterator[Point]:
    resources = read_recipe(workspace).resources
    used = usage_of(workspace, stage)
    values: dict[str, float] = {f"{key}/{stage}": getattr(used, key) for key in _METRICS}
    if resources.price_per_gpu_hour is not None or resources.price_per_cpu_hour is not None:
        values[f"cost/{stage}"] = cost(used, resources)
        names = stage_names(PROJECT)
        if stage == names[-1]:
            values[TOTAL] = sum(cost(usage_of(workspace, each), resources) for each in names)
    values |= stage_beside_measured(workspace, stage, used.seconds, values.get(f"cost/{stage}"))
    # A stage that a user cleared is finished twice; the second point has a step of its own.
    step = max(0, used.endings - 1)
    for key, value in values.items():
        yield Point(key, value, int(used.last * 1000), step)


def cost(used: Usage, resources: Resources) -> float:
    """A GPU's price holds the CPU of its worker; another worker costs a CPU's."""
    gpu_price, cpu_price = resources.price_per_gpu_hour or 0.0, resources.price_per_cpu_hour or 0.0
    return used.gpu_hours * gpu_price + max(0.0, used.worker_hours - used.gpu_hours) * cpu_price


def training_elsewhere(facts: Mapping[str, Any]) -> dict[str, float] | None:
    """What training cost the earlier run that did it, where the stage cache held its result."""
    here, there = (facts.get("run") or {}).get("mlflow_run_id"), facts.get("trained_by")
    if there is None or there == here or (facts.get("cost") or {}).get("train", {}).get("seconds"):
        return None
    run = run_if_any(there)
    if run is None:
        return None
    metrics = {each["key"]: each["value"] for each in run["data"].get("metrics", [])}
    found = {key: metrics.get(f"{key}/train", 0.0) for key in _METRICS}
    return found | {"money": metrics.get("cost/train", 0.0)}
