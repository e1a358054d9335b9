"""A run's plan in its workspace, compared with what was measured.

This module doesn't import the planning code: every stage imports this module, and a stage must not
run again because a formula of the planning changed.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pipelines.core.storage import read_json, write_json
from pipelines.run.records import TrainRecord

PLAN = "plan.json"  # in a workspace; no stage reads it, so no result depends on it
DRY_RUN = "dry_run.json"  # in a workspace, for users
_HOST = "host"  # as in `planning/roofs.py`
_GIB = 2**30


def keep_plan(workspace: Path, values: dict[str, Any]) -> None:
    """Write `plan.json`."""
    write_json(workspace / PLAN, values)


def keep_dry_run(workspace: Path, values: dict[str, Any]) -> None:
    """Write `dry_run.json`."""
    write_json(workspace / DRY_RUN, values)


def read_plan(workspace: Path) -> dict[str, Any] | None:
    """Return the kept plan, or None if the machine was unknown or nothing was predicted."""
    path = workspace / PLAN
    found: dict[str, Any] | None = read_json(path) if path.is_file() else None
    return found if found and found["hours"] is not None else None


def beside_measured(
    workspace: Path, tokens_per_second: Sequence[float], memory_bytes: int | None
) -> dict[str, float]:
    """Return the predicted and the measured speed and memory, and each prediction's relative error.

    Args:
        workspace: The run's workspace.
        tokens_per_second: The speed at each point of the curves; their median is compared.
        memory_bytes: The peak memory of tensors, or None if it was not measured.
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
    """Return the predicted bottleneck as text and whether it was right, or None without a plan.

    Where the host was the bottleneck, no roof was near enough to tell that a plan was wrong.

    Args:
        workspace: The run's workspace.
        reported: What limited most of the training: a resource, or the host.
    """
    found = read_plan(workspace)
    if found is None:
        return None
    bound_by = found["bound_by"]
    return f"{bound_by} for {found['bound_share']:.1%} of a step", reported in (bound_by, _HOST)


def stage_beside_measured(
    workspace: Path, stage: str, seconds: float, cost: float | None
) -> dict[str, float]:
    """Return the predicted and the measured time of a stage, and the cost of training."""
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
