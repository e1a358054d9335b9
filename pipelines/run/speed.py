"""How fast a run trained between the points of its curves, and where that changed."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from pydantic import BaseModel

from pipelines.core.formatting import duration
from pipelines.core.line_files import read_lines

CURVES = "checkpoints/curves.jsonl"  # in a workspace: the points for MLflow, with their times
_SLOW, _USUAL = 0.75, 3  # slow is below this share of the speed of so many windows or more
_MATTERS, _LEAST_S = 0.05, 1.0  # of all steps' time, and seconds: what slow windows must cost
_NAMES = {"mfu": "compute", "mbu": "memory", "communication_share": "network"}


class Window(BaseModel):
    """The steps from one point of the curves to the next; steps done again make no point."""

    step: int
    milliseconds: int  # since 1970, when the window ended
    values: dict[str, float]  # of `StepMetrics`, by `train/` and its name


def windows(workspace: Path) -> list[Window]:
    """Return the windows of a run, oldest first."""
    return read_lines(workspace / CURVES, Window)


def slowdown(known: Sequence[Window]) -> str | None:
    """Return a sentence about windows slower than the run's own earlier ones, if they matter."""
    usual, slow = list[Window](), list[Window]()
    lost = whole = 0.0
    for last, now in pairwise(known):  # the first window has the warm-up in it
        steps, seconds = now.step - last.step, _middle([now], "step_seconds")
        whole += steps * seconds
        known_speed = _middle(usual, "tokens_per_second") if len(usual) >= _USUAL else 0.0
        if _middle([now], "tokens_per_second") >= _SLOW * known_speed:
            usual.append(now)
        else:
            slow.append(now)
            lost += steps * (seconds - _middle(usual, "step_seconds"))
    if lost <= max(_MATTERS * whole, _LEAST_S):
        return None
    quick, tardy = (f"{_middle(each, 'tokens_per_second'):,.0f}" for each in (usual, slow))
    waited, waits = (f"{_middle(each, 'data_wait_share'):.0%}" for each in (usual, slow))
    return (
        f"Training was slower in {len(slow)} of {len(known)} windows, which end at steps "
        f"{slow[0].step} to {slow[-1].step}: {tardy} tokens/s, usually {quick}, which cost "
        f"{duration(lost)}; steps waited for data for {waits} of their time, usually {waited}"
    )


def seconds_lost(known: Sequence[Window], moments: Sequence[float]) -> float | None:
    """Return the time between two points around faults, beyond that of the steps between.

    The faults were noted at these moments, in seconds since 1970; None: not between two points.
    """
    lost = [
        (now.milliseconds - last.milliseconds) / 1000
        - (now.step - last.step) * _middle([now], "step_seconds")
        for last, now in pairwise(known)
        if any(last.milliseconds < 1000 * moment <= now.milliseconds for moment in moments)
    ]
    return max(0.0, sum(lost)) if lost else None


def bound_by(window: Window) -> str:
    """Return what limited a window: the curves have its share, but not its name."""
    share = window.values["train/bound_share"]
    names = [name for key, name in _NAMES.items() if window.values.get(f"train/{key}") == share]
    waits = share == window.values["train/data_wait_share"]
    return f"{'waiting for data' if waits else [*names, 'the host or PCIe'][0]} at {share:.0%}"


def _middle(known: Sequence[Window], name: str) -> float:
    return median(window.values[f"train/{name}"] for window in known)
