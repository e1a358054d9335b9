"""The figures that a run reports as it trains, and its training curve: a file of JSON lines."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pipelines.core.line_files import LineFile, parse_lines
from pipelines.planning.roofs import HOST

Point = dict[str, Any]  # what StepMetrics.curve_point returns


class History:
    """The points of a run's training curve; a resumed run goes on from its checkpoint's step."""

    def __init__(self, path: Path) -> None:
        """Read the file's points; a line that is not whole, or is none, is dropped."""
        self._file = LineFile(path)
        found = parse_lines(self._file.read(), Point)
        self.points: list[Point] = [each for each in found if isinstance(each.get("step"), int)]

    @property
    def last_step(self) -> int:
        """The step of the last point; 0 before the first."""
        return int(self.points[-1]["step"]) if self.points else 0

    def add(self, point: Point) -> None:
        """Append a point, and drop those of its step or later, which precede a failure."""
        kept = [old for old in self.points if old["step"] < point["step"]]
        went_back = len(kept) < len(self.points)
        self.points = [*kept, point]
        if went_back:
            self._file.replace(self.lines())
        else:
            self._file.append(json.dumps(point))

    def lines(self) -> list[str]:
        """Return all points as JSON lines, also those that the disk has no room for yet."""
        return [json.dumps(point) for point in self.points]


_CURVE = ("step", "tokens", "loss", "learning_rate", "gradient_norm", "steps_left_out", "samples")


@dataclass(frozen=True)
class StepMetrics:
    """One point of the training curves.

    Loss and gradient norm are those of the last step that the guard did not leave out. Times,
    shares and memory are the reporting process's, as means over the steps since the last point.
    """

    step: int  # optimizer steps done
    last_step: int  # after which the run ends, as far as is known
    tokens: int  # seen so far, over all processes
    loss: float  # nats a token, over all processes
    learning_rate: float
    gradient_norm: float  # before clipping
    steps_left_out: int  # so far, as they were not finite or spikes
    samples: str  # a hash of those, in order, since the last multiple of `log_every` steps

    step_seconds: float
    tokens_per_second: float  # over all processes
    mfu: float  # model FLOPs ÷ the device's FLOPs; the log and a tag name both
    mbu: float  # the model's memory traffic ÷ the device's memory bandwidth
    data_wait_share: float  # the part of the time spent waiting for the loader
    communication_share: float | None  # of a window, only communicating; None until measured
    memory_bytes: int | None  # the most that tensors had; None on a CPU until measured
    bound_by: str  # the resource whose limit (roof) the step is nearest, or the host
    bound_share: float  # of that roof; of the step, if it is the host

    last: bool  # whether this is the run's last point
    # Of a mixture of experts: `Routing.figures`, and its `shares`; of pairs: `PairLoss.figures`.
    further: Mapping[str, float] = field(default_factory=dict)
    expert_shares: Sequence[Sequence[float]] = ()

    def curve_point(self) -> Point:
        """Return the figures that depend only on recipe and data, not on the machine's speed."""
        return {key: getattr(self, key) for key in _CURVE}

    def curves(self) -> dict[str, float]:
        """Return all numbers under the names that MLflow shows."""
        return {
            f"train/{key}": value
            for key, value in {**asdict(self), **self.further}.items()
            if key not in ("step", "last_step", "last") and isinstance(value, float | int)
        }

    def line(self) -> str:
        """Return a line about the run's speed and the resource that limits it."""
        talk = _known(self.communication_share, ".1%")
        gib = _known(self.memory_bytes and self.memory_bytes / 2**30, ".3g")
        return (
            f"step {self.step}: loss {self.loss:.4f}, {self.tokens_per_second:,.0f} tokens/s, "
            f"MFU {self.mfu:.1%}, MBU {self.mbu:.1%}, waits for data {self.data_wait_share:.1%}, "
            f"communicates {talk}, {gib} GiB; bound by {_bound(self.bound_by, self.bound_share)}"
        )


def _bound(name: str, share: float) -> str:
    if name == HOST:  # no roof is reached by half
        return f"{name} for {share:.1%} of a step, idle device included"
    return f"{name} at {share:.1%} of its roof"


def _known(value: float | None, form: str) -> str:
    return "(not measured yet)" if value is None else format(value, form)


def summary(points: Sequence[StepMetrics]) -> tuple[str, str]:
    """Return what limited a run, and a line for users; the numbers are medians over its points."""
    name = most_bound_by(points)
    share = median(point.bound_share for point in points if point.bound_by == name)
    bound = _bound(name, share)
    middle = {
        key: median(getattr(point, key) for point in points)
        for key in ("tokens_per_second", "mfu", "mbu", "data_wait_share")
    }
    return bound, (
        f"{middle['tokens_per_second']:,.0f} tokens/s, MFU {middle['mfu']:.1%}, "
        f"MBU {middle['mbu']:.1%}, waits for data {middle['data_wait_share']:.1%}; bound by {bound}"
    )


def most_bound_by(points: Sequence[StepMetrics]) -> str:
    """Return the resource that limited most of the points."""
    return Counter(point.bound_by for point in points).most_common(1)[0][0]


Report = Callable[[StepMetrics], None]
"""Every process calls it at the same steps, so it may contain a barrier."""
