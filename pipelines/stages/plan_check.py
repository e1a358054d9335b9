"""A run's plan in its workspace, and how right it was.

No planning is imported here: every stage reads this module, and none shall run anew where a formula
changed.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pipelines.core.storage import read_json, write_json
from pipelines.run.records import TrainRecord

PLAN = "plan.json"  # in a workspace; no stage reads it, so no result depends on it
_GIB = 2**30


def keep_plan(workspace: Path, values: dict[str, Any]) -> None:
    """Write `plan.json`."""
    write_json(workspace / PLAN, values)


def read_plan(workspace: Path) -> dict[str, Any] | None:
    """What was kept; None where the machine was unknown, or nothing was forecast."""
    path = workspace / PLAN
    found: dict[str, Any] | None = read_json(path) if path.is_file() else None
    return found if found and found["hours"] is not None else None


def beside_measured(
    workspace: Path, tokens_per_second: Sequence[float], memory_bytes: int | None
) -> dict[str, float]:
    """Predicted and measured speed and memory, and by which share each prediction is off.

    Args:
        workspace: The run's.
        tokens_per_second: Of each point of the curves; the middle one counts.
        memory_bytes: Most that tensors had; None where that was not measured.
    """
    found = read_plan(workspace)
    if found is None:
        return {}
    pair = _pair("tokens_per_second", found["tokens_per_second"], median(tokens_per_second))
    if memory_bytes is None:
        return pair
    memory = found["asked"]["memory_gib"]
    return pair | _pair("memory_gib", memory["total"] - memory["margin"], memory_bytes / _GIB)


def bound_beside_reported(workspace: Path, reported: str) -> tuple[str, bool] | None:
    """What was to bind training, for a user, and whether it was that; None without a plan.

    Args:
        workspace: The run's.
        reported: The resource that bound most of it.
    """
    found = read_plan(workspace)
    if found is None:
        return None
    bound_by = found["bound_by"]
    return f"{bound_by} for {found['bound_share']:.1%} of a step", bound_by == reported


def stage_beside_measured(
    workspace: Path, stage: str, seconds: float, cost: float | None
) -> dict[str, float]:
    """The same of a stage's time, where it was forecast, and of what training cost."""
    found = read_plan(workspace)
    planned = found["stages"][stage] if found else {}
    pairs = {}
    if planned.get("hours") is not None:
        pairs = _pair(f"{stage}_seconds", planned["hours"] * 3600, seconds)
    if stage == TrainRecord.stage and cost is not None and planned.get("cost") is not None:
        pairs |= _pair("cost", planned["cost"], cost)
    return pairs


def _pair(name: str, predicted: float, measured: float) -> dict[str, float]:
    pair = {f"plan/{name}_predicted": predicted, f"plan/{name}_measured": measured}
    return pair | ({f"plan/{name}_error": predicted / measured - 1} if measured else {})
