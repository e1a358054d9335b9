"""The charts of the compare page, each with a table or text that gives the same figures.

`Side` is one of the two models of a comparison, with what its lineage and its run record about it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pipelines.core.formatting import (
    UNKNOWN,
    decimals,
    interval,
    percent,
    probability,
    signed,
    size,
)
from pipelines.evaluation.charts import Bar, CurveChart, Scale, Tick, curve_chart, extent
from pipelines.evaluation.html_page import Table
from pipelines.evaluation.loss_curve import CurvePoint
from pipelines.recipe.recipe import Register
from pipelines.run.verdict import Comparison, Estimate, Probes, SliceChange, Verdict


@dataclass(frozen=True)
class Side:
    """A model, about which facts may be missing: its files may be deleted or from another tool.

    Attributes:
        name: The name that users know it by.
        facts: Its lineage, as in `lineage.json`; may be empty.
        curve: Its training loss; None if none is kept.
        training: The cost of its training, if the result came from the stage cache: `seconds`,
            `worker_hours`, `gpu_hours`, `money`.
        probes: The results of its probes.
    """

    name: str
    facts: Mapping[str, Any]
    curve: Sequence[CurvePoint] | None = None
    training: Mapping[str, float] | None = None
    probes: Probes = field(default_factory=Probes)

    def fact(self, *path: str) -> Any:
        """Return a value of the lineage, or None if there is none."""
        found: Any = self.facts
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def cost(self, stage: str) -> Mapping[str, float]:
        """Return a stage's cost (for training, wherever it ran); it is empty if unknown."""
        if stage == "train" and self.training:
            return self.training
        return self.fact("cost", stage) or {}

    @property
    def samples(self) -> dict[str, str]:
        """The text that the model wrote after each prompt."""
        prompts = self.fact("recipe", "evaluate", "prompts") or ()
        texts = self.fact("records", "evaluate", "samples") or ()
        return {prompt: text[len(prompt) :] for prompt, text in zip(prompts, texts, strict=False)}


_ROWS_OF_A_CURVE = 8


def changes(verdict: Verdict, demands: Register) -> dict[str, Any] | None:
    """Return the improvement on all documents and each slice, or None if nothing was compared."""
    found, theirs = verdict.comparison, verdict.champion_bits_per_byte
    if found is None or theirs is None:
        return None
    kind = f"total {'better' if found.improvement.value > 0 else 'worse'}"
    least = (100 * demands.min_improvement / theirs,)
    groups = [("", [_change_bar("all documents", found.improvement, theirs, kind, least)])]
    for dimension, members in groupby(found.slices, lambda each: each.slice.dimension):
        groups.append((dimension, [_slice_bar(each, demands) for each in members]))
    scale = Scale.around([0.0, *extent(bar for _, bars in groups for bar in bars)])
    ticks = scale.ticks(6)
    return {
        "groups": groups,
        "scale": scale,
        "ticks": [(tick, f"{signed(tick.value, _digits(scale))} %") for tick in ticks],
        "table": _change_table(verdict, found),
        "confidence": probability(found.confidence),
        "slice_confidence": probability(found.slice_confidence),
        "slices": len(found.slices),
    }


def _slice_bar(change: SliceChange, demands: Register) -> Bar:
    kind = "better" if change.improvement.value > 0 else "worse"
    return _change_bar(
        change.slice.name,
        change.improvement,
        change.champion_bits_per_byte,
        "regressed" if change.regressed else kind,
        (-100 * demands.max_slice_regression,),
    )


def _change_bar(
    name: str, found: Estimate, champion: float, kind: str, limits: tuple[float, ...]
) -> Bar:
    """Return the bar of a change, in percent of the champion's bits per byte."""
    lower, upper = percent(found.lower, champion), percent(found.upper, champion)
    share = 100 * found.value / champion
    note = interval(lower, upper, 2, sign=True) or "no interval"
    return Bar(name, f"{signed(share, 2)} %", share, lower, upper, note, kind, limits)


def _change_table(verdict: Verdict, found: Comparison) -> Table:
    columns = ("documents", "number", "champion", "candidate", "improvement", "interval")
    rows = [
        (
            str(each.slice),
            f"{each.documents:,}",
            decimals(each.champion_bits_per_byte),
            decimals(each.candidate_bits_per_byte),
            *_estimate(each.improvement),
        )
        for each in found.slices
    ]
    everything = (
        "all",
        f"{found.documents:,}",
        decimals(verdict.champion_bits_per_byte),
        decimals(verdict.candidate_bits_per_byte),
        *_estimate(found.improvement),
    )
    return Table(columns, [everything, *rows])


def _estimate(found: Estimate) -> tuple[str, str]:
    return signed(found.value), interval(found.lower, found.upper, sign=True) or UNKNOWN


def rejects(candidate: Side) -> dict[str, Any]:
    """Return how many documents were dropped for each reason."""
    counted = candidate.fact("records", "preprocess", "stats", "documents") or {}
    total, dropped = counted.get("in", 0), counted.get("dropped", {})
    if dropped:
        lost = sum(dropped.values())
        share = f"{100 * lost / total:.3g} %"
        text = f"{lost:,} of {total:,} documents that were read ({share}), by reason."
    else:
        text = (
            f"None of {total:,} documents was dropped." if total else "Their number is not known."
        )
    rows = [
        Bar(reason.replace("_", " "), f"{count:,}", count, note=f"{100 * count / total:.3g} %")
        for reason, count in sorted(dropped.items(), key=lambda each: (-each[1], each[0]))
    ]
    return {"rows": rows, "scale": Scale.from_zero(extent(rows)), "text": text}


def loss(candidate: Side, champion: Side | None) -> dict[str, Any]:
    """Return the training curves on common axes."""
    named = [("candidate", candidate.curve or ())]
    named += [(champion.name, champion.curve or ())] if champion else []
    chart = curve_chart(dict(zip(("model", "theirs"), (each for _, each in named), strict=False)))
    rows = [
        (
            name,
            f"{each.step:,}",
            size(each.text_bytes),
            decimals(each.loss),
            decimals(each.bits_per_byte),
        )
        for name, points in named
        for each in _some(points)
    ]
    columns = ("run", "step", "text seen", "nats a token", "bits per byte")
    return {
        "chart": chart,
        "both": len(named) == 2 and bool(named[1][1]),
        **(_axes(chart) if chart else {}),
        "note": " ".join(_notes(chart is not None, named)),
        "words": " ".join(_ends(name, points) for name, points in named if points),
        "table": Table(columns, rows),
    }


def _axes(chart: CurveChart) -> dict[str, list[tuple[Tick, str]]]:
    digits = _digits(chart.y)
    return {
        "up": [(tick, decimals(tick.value, digits)) for tick in chart.y.ticks()],
        # A label in the corner would reach beyond the chart.
        "along": [(tick, size(tick.value)) for tick in chart.x.ticks(4) if tick.at < 97],
    }


def _notes(drawn: bool, named: Sequence[tuple[str, Sequence[CurvePoint]]]) -> Iterator[str]:
    for name, points in named:
        bad = sum(not math.isfinite(each.loss) for each in points)
        if not points:
            yield f"No loss of {name} is kept."
        elif bad:
            yield f"{bad:,} of {len(points):,} points of {name} are not a number."
    if not drawn:
        yield "There is nothing to draw."


def _ends(name: str, points: Sequence[CurvePoint]) -> str:
    first, last = points[0], points[-1]
    return (
        f"{name}: from {decimals(first.bits_per_byte)} bits per byte at step {first.step} to "
        f"{decimals(last.bits_per_byte)} at step {last.step}."
    )


def _some(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Return the first and the last point, and some evenly spaced points between them."""
    if len(points) <= _ROWS_OF_A_CURVE:
        return list(points)
    last = _ROWS_OF_A_CURVE - 1
    return [points[round(n * (len(points) - 1) / last)] for n in range(_ROWS_OF_A_CURVE)]


def _digits(scale: Scale) -> int:
    """Return how many decimals are needed to tell the ticks of an axis apart."""
    return max(0, math.ceil(-math.log10((scale.high - scale.low) / 8)))
