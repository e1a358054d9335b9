"""Bits per byte as bars: of each slice with its interval, and among the yardsticks."""

import math
from itertools import groupby
from typing import Any

from pipelines.core.figures import UNKNOWN, baseline_label, decimals, interval, size
from pipelines.core.records import EvaluateRecord
from pipelines.core.verdict import HARNESS_COLUMNS, Estimate, harness_rows
from pipelines.evaluation.charts import Bar, Scale, extent
from pipelines.evaluation.page import Table


def slice_chart(record: EvaluateRecord) -> dict[str, Any]:
    """Each slice under its dimension, and a table of the same."""
    groups = [
        (dimension, [_score_bar(each.slice.name, each.bits_per_byte) for each in members])
        for dimension, members in groupby(record.slices, lambda each: each.slice.dimension)
    ]
    rows = [
        (
            str(each.slice),
            f"{each.documents:,}",
            size(each.bytes),
            decimals(each.bits_per_byte.value),
            interval(each.bits_per_byte.lower, each.bits_per_byte.upper) or UNKNOWN,
        )
        for each in record.slices
    ]
    return {
        "groups": groups,
        "scale": Scale.from_zero(extent(bar for _, bars in groups for bar in bars)),
        "table": Table(("documents", "number", "text", "bits per byte", "interval"), rows),
    }


def _score_bar(name: str, found: Estimate) -> Bar:
    text, note = decimals(found.value, 3), interval(found.lower, found.upper, 3)
    return Bar(name, text, found.value, found.lower, found.upper, note, "model")


def harness_table(record: EvaluateRecord) -> Table | None:
    """What lm-evaluation-harness found; None where no task was run."""
    return Table(HARNESS_COLUMNS, harness_rows(record.harness)) if record.harness else None


def yardstick_chart(
    record: EvaluateRecord, name: str, champion: float | None = None
) -> dict[str, Any]:
    """The model of this name, and the champion, among n-grams and xz; the best first."""
    rows = [
        Bar(baseline_label(each), decimals(value, 3), value)
        for each, value in record.baselines.items()
    ]
    ours = record.bits_per_byte
    rows.append(Bar(name, decimals(ours, 3), ours, kind="model total"))
    if champion is not None:
        rows.append(Bar("champion", decimals(champion, 3), champion, kind="theirs total"))
    rows.sort(key=lambda bar: (math.isnan(bar.value), bar.value))
    return {"rows": rows, "scale": Scale.from_zero(extent(rows))}
