"""What a run tells of itself as it trains.

The training curve as a file: one JSON line a report.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pipelines.core.storage import LineFile

Point = dict[str, Any]  # `step`, and what StepMetrics.curve_point says of it


class History:
    """The points of a run; a resumed run goes on where its checkpoint was."""

    def __init__(self, path: Path) -> None:
        """Read the points that are there; half a line at the end is dropped."""
        self._file = LineFile(path)
        self.points: list[Point] = [json.loads(line) for line in self._file.read()]

    @property
    def last_step(self) -> int:
        """The step of the last point; 0 before the first."""
        return int(self.points[-1]["step"]) if self.points else 0

    def add(self, point: Point) -> None:
        """Append a point; those of its step and later ones are from before a failure and go."""
        kept = [old for old in self.points if old["step"] < point["step"]]
        went_back = len(kept) < len(self.points)
        self.points = [*kept, point]
        if went_back:
            self._file.replace(self.lines())
        else:
            self._file.append(json.dumps(point))

    def lines(self) -> list[str]:
        """All points as they are written, also what the disk has no room for yet."""
        return [json.dumps(point) for point in self.points]


_CURVE = ("step", "tokens", "loss", "learning_rate", "gradient_norm", "steps_left_out", "samples")


@dataclass(frozen=True)
class StepMetrics:
    """One point of the training curves.

    Loss and gradient norm are of the last step that was not left out by the guard. Times, shares
    and memory are those of the reporting process, the mean over the steps since the last point.
    """

    step: int  # optimizer steps done
    tokens: int  # seen so far, over all processes
    loss: float  # nats a token, over all processes
    learning_rate: float
    gradient_norm: float  # before clipping
    steps_left_out: int  # so far: not finite, or a spike
    samples: str  # a hash of those since the last multiple of `log_every` steps, in their order

    step_seconds: float
    tokens_per_second: float  # over all processes
    mfu: float  # model FLOPs over what the device can do; the log and a tag name both
    mbu: float  # the model's bytes to and from the device's memory likewise
    data_wait_share: float  # of the time, waiting for the loader
    communication_share: float | None  # of a measured window, only talking; None until measured
    memory_bytes: int | None  # most that tensors had; None on a CPU until that was measured
    bound_by: str  # what the step is nearest the roof of
    bound_share: float  # and how near

    last: bool  # of this run

    def curve_point(self) -> Point:
        """What depends on recipe and data alone, and not on the machine's speed."""
        return {key: getattr(self, key) for key in _CURVE}

    def curves(self) -> dict[str, float]:
        """All figures under the names that MLflow shows."""
        return {
            f"train/{key}": value
            for key, value in asdict(self).items()
            if key not in ("step", "last") and isinstance(value, float | int)
        }

    def line(self) -> str:
        """Tell a user how fast it is, and what binds."""
        talk = _known(self.communication_share, ".1%")
        gib = _known(self.memory_bytes and self.memory_bytes / 2**30, ".3g")
        return (
            f"step {self.step}: loss {self.loss:.4f}, {self.tokens_per_second:,.0f} tokens/s, "
            f"MFU {self.mfu:.1%}, MBU {self.mbu:.1%}, waits for data {self.data_wait_share:.1%}, "
            f"talks {talk}, {gib} GiB; bound by {self.bound_by} at "
            f"{self.bound_share:.1%} of its roof"
        )


def _known(value: float | None, form: str) -> str:
    return "(not measured yet)" if value is None else format(value, form)


def summary(points: Sequence[StepMetrics]) -> tuple[str, str]:
    """What bound a run, and a line about it for a user; medians over its points."""
    name = most_bound_by(points)
    share = median(point.bound_share for point in points if point.bound_by == name)
    bound = f"{name} at {share:.1%} of its roof"
    middle = {
        key: median(getattr(point, key) for point in points)
        for key in ("tokens_per_second", "mfu", "mbu", "data_wait_share")
    }
    return bound, (
        f"{middle['tokens_per_second']:,.0f} tokens/s, MFU {middle['mfu']:.1%}, "
        f"MBU {middle['mbu']:.1%}, waits for data {middle['data_wait_share']:.1%}; bound by {bound}"
    )


def most_bound_by(points: Sequence[StepMetrics]) -> str:
    """The resource that bound most of them."""
    return Counter(point.bound_by for point in points).most_common(1)[0][0]


Report = Callable[[StepMetrics], None]
"""Called on every process alike, so it may be a barrier."""
