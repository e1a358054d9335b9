"""A plan as plain values: what `penstock plan --json` prints, and `plan.json` of a run."""

from dataclasses import asdict
from typing import Any

from pipelines.planning.plan import Plan
from pipelines.planning.search import GIB, Candidate


def plan_json(found: Plan, limit: int | None = None) -> dict[str, Any]:
    """One object of plain values.

    Args:
        found: The plan.
        limit: Layouts at most; None: all.
    """
    machine, forecast = found.machine, found.forecast
    result: dict[str, Any] = {
        "fits": found.fits,
        "gpu": machine.hardware.name,
        "gpus": machine.gpus,
        "nodes": machine.nodes,
        "parameters": found.parameters,
        "mfu_is_assumed": machine.hardware.mfu is None,
        "asked": _candidate_json(found.asked[0]),
        "layouts": [_candidate_json(each) for each in found.layouts[:limit]],
        "flops": None,
        "hours": None,
        "cost": None,
    }
    if forecast is None:
        return result
    values = asdict(forecast)
    values["checkpoint"]["total"] = forecast.checkpoint.total
    for each, demand in zip(values["demands"], forecast.demands, strict=True):
        each["holds"] = demand.holds
    for name, stage in forecast.stages.items():
        values["stages"][name]["cost"] = stage.cost
    return result | values | {"hours": forecast.hours, "cost": forecast.cost}


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    choice, step = candidate.choice, candidate.step
    result: dict[str, Any] = {
        "name": candidate.name,
        "fits": candidate.fits,
        "why_not": candidate.why_not,
        "step_seconds": None,
        "memory_gib": None,
    }
    if choice is None or step is None:
        return result
    training = choice.training
    memory = {part: size / GIB for part, size in choice.memory.parts.items()}
    return result | {
        **vars(training.layout),
        "sharding": training.sharding,
        "micro_batch_size": training.micro_batch,
        "activation_checkpoint": training.activation_checkpoint,
        "step_seconds": step.total,
        "step_parts": {key: value for key, value in asdict(step).items() if key != "memory"},
        "memory_gib": memory | {"total": choice.memory.total / GIB},
    }
