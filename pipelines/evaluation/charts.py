"""Positions of a chart's marks, which a page draws as inline SVG that stretches to fit.

Positions are percentages of the chart's width and height. Labels are text beside the drawing, so
they keep their size on a phone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipelines.evaluation.bootstrap import Floats
from pipelines.evaluation.loss_curve import CurvePoint

_STRETCHES = 120  # parts of a curve; each is drawn as a mean and a range if there are more points
_MOST_SHOWN = 90  # percentile: otherwise the first steps of a run would make the rest look flat


class Tick(NamedTuple):
    """A figure on an axis."""

    at: float  # percent
    value: float


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float], *, room: float = 0.04) -> "Scale":
        """Return the scale that holds all finite values, with some room at both ends."""
        finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        wide = (high - low) or abs(high) or 1.0
        return cls(low - room * wide, high + room * wide)

    @classmethod
    def from_zero(cls, values: Sequence[float]) -> "Scale":
        """Return the scale from zero to the largest finite value."""
        return cls(0.0, max((each for each in values if math.isfinite(each)), default=0.0) or 1.0)

    def at(self, value: float) -> float:
        """Return the position in percent; a value outside the scale is drawn at its end."""
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)

    def ticks(self, most: int = 5) -> list[Tick]:
        """Return ticks at round figures: multiples of 1, 2 or 5 times a power of ten."""
        least = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= least * (1 - 1e-9))
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [Tick(self.at(n * step), n * step) for n in range(first, last + 1)]


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart: a value, and its interval if it has one."""

    name: str
    text: str  # the value as a user reads it
    value: float
    lower: float | None = None
    upper: float | None = None
    note: str = ""  # smaller, after the text
    kind: str = ""  # a CSS class of the page
    limits: tuple[float, ...] = ()  # values that the row marks


def extent(bars: Iterable[Bar]) -> list[float]:
    """Return all values that a chart of these bars must have room for."""
    return [
        end
        for bar in bars
        for end in (bar.value, bar.lower, bar.upper, *bar.limits)
        if end is not None
    ]


class Curve(NamedTuple):
    """A line and the range around it, as paths in a box of 100 by 100; y points down."""

    kind: str
    line: str
    range: str
    dots: str  # points without a neighbour, drawn as lines of length 0 with round ends


@dataclass(frozen=True)
class CurveChart:
    """Curves on common axes."""

    curves: tuple[Curve, ...]
    x: Scale
    y: Scale
    cut: bool  # a part of the curves lies above the chart


def curve_chart(curves: dict[str, Sequence[CurvePoint]]) -> CurveChart | None:
    """Return the chart of bits per byte over the text seen, or None if no point is a number.

    Args:
        curves: The points of each curve, by the CSS class that draws it.
    """
    drawn = {kind: _stretches(points) for kind, points in curves.items() if points}
    means = np.concatenate([each[:, 1] for each in drawn.values()] or [np.zeros(0)])
    means = means[np.isfinite(means)]
    if not len(means):
        return None
    most = float(np.percentile(means, _MOST_SHOWN)) if len(means) > 1 else float(means[0])
    y = Scale.around([float(means.min()), most], room=0.08)
    x = Scale(0.0, 1.01 * max(float(each[-1, 0]) for each in drawn.values()) or 1.0)
    return CurveChart(
        curves=tuple(_curve(kind, rows, x, y) for kind, rows in drawn.items()),
        x=x,
        y=y,
        cut=bool(means.max() > y.high),
    )


def _stretches(points: Sequence[CurvePoint]) -> Floats:
    """Return each part's text seen, and its mean, least and most bits per byte, [N, 4]."""
    values = np.array([(each.text_bytes, each.bits_per_byte) for each in points])
    rows = []
    for part in np.array_split(values, min(len(values), _STRETCHES)):
        finite = part[np.isfinite(part[:, 1]), 1]
        figures = (finite.mean(), finite.min(), finite.max()) if len(finite) else (math.nan,) * 3
        rows.append((part[-1, 0], *figures))
    return np.array(rows)


def _curve(kind: str, rows: Floats, x: Scale, y: Scale) -> Curve:
    """Return the paths of a curve; a part without a number is a gap."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for row in rows.tolist():
        if math.isfinite(row[1]):
            runs[-1].append(row)
        elif runs[-1]:
            runs.append([])
    lines, ranges, dots = [], [], []
    for run in filter(None, runs):
        middle = [(x.at(text), _down(y, mean)) for text, mean, _, _ in run]
        if len(run) == 1:
            dots.append(_path(middle * 2))
            continue
        lines.append(_path(middle))
        lower = [(x.at(text), _down(y, least)) for text, _, least, _ in run]
        upper = [(x.at(text), _down(y, most)) for text, _, _, most in run]
        ranges.append(_path([*upper, *reversed(lower)]) + "Z")
    return Curve(kind, " ".join(lines), " ".join(ranges), " ".join(dots))


def _down(y: Scale, value: float) -> float:
    """Return the distance from the top in percent; a value above the chart stays above it."""
    share = (value - y.low) / (y.high - y.low)
    return round(100 * (1 - min(share, 2.0)), 2)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
