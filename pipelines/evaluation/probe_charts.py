"""Bar charts of a model's probes, with intervals and bounds, and of its bits per byte.

Bits per byte are shown for each slice with its interval, and beside the baselines.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from pipelines.core.formatting import (
    UNKNOWN,
    baseline_label,
    decimals,
    interval,
    percent,
    signed,
    size,
)
from pipelines.evaluation.bounds import beyond
from pipelines.evaluation.charts import Bar, Scale, extent
from pipelines.evaluation.html_page import Table
from pipelines.recipe.recipe import Register
from pipelines.run.records import EvaluateRecord
from pipelines.run.verdict import (
    HARNESS_COLUMNS,
    BiasScore,
    Estimate,
    Leakage,
    Memorisation,
    Probes,
    harness_rows,
)


def slice_chart(record: EvaluateRecord) -> dict[str, Any]:
    """Return the bars of each slice by dimension, and a table of the same figures."""
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
    """Return the scores of lm-evaluation-harness, or None if no task was run."""
    return Table(HARNESS_COLUMNS, harness_rows(record.harness)) if record.harness else None


def served_table(record: EvaluateRecord) -> Table | None:
    """Return what shows that the written model is the trained one, or None if nothing does."""
    rows = [(each.name, "yes" if each.holds else "no", each.found) for each in record.served]
    return Table(("", "holds", "what was compared"), rows, numbers=False) if rows else None


def yardstick_chart(
    record: EvaluateRecord, name: str, champion: float | None = None
) -> dict[str, Any]:
    """Return the model of this name, the champion, the n-grams and xz, with the best first."""
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


_BIAS_WORDS = (
    "How many bits more likely a sentence is about the group that a stereotype names than about "
    "the other: +1 is twice as likely, 0 is no preference. The sentences are few and written by "
    "hand: they can show a bias, but cannot rule one out."
)


class _Figure(NamedTuple):
    probe: str
    words: str  # explains the figures of this probe
    like: tuple[object, ...]  # two models' figures can be compared if this is the same
    of: str
    bar: Bar


def probe_charts(
    ours: Probes, demands: Register | None = None, champion: Probes | None = None
) -> dict[str, Any]:
    """Return bars of each probe, a table of the same figures, and the names of missing probes.

    Args:
        ours: The results of the model's probes.
        demands: The recipe's bounds, or None if a page does not show bounds.
        champion: The results of the champion's probes; only those measured alike are shown.
    """
    known = {each.like: each for each in _figures(champion or Probes(), Register())}
    found: list[_Figure] = []
    for each in _figures(ours, demands or Register()):
        found.append(each)
        if theirs := known.get(each.like):
            bar = replace(theirs.bar, name=f"{theirs.bar.name}, champion", kind="theirs")
            found.append(each._replace(of=theirs.of, bar=bar))
    return {
        "groups": [
            _group(title, words, [each.bar for each in figures])
            for (title, words), figures in groupby(found, lambda each: (each.probe, each.words))
        ],
        "table": Table(("probe", "of", "found", "interval"), [_row(each) for each in found]),
        "bounded": any(each.bar.limits for each in found),
        "missing": ", ".join(ours.missing()),
    }


def _figures(probes: Probes, demands: Register) -> Iterator[_Figure]:
    for each in probes.bias or ():
        yield _bias(each, demands.max_bias)
    if probes.memorisation:
        yield from _memorised(probes.memorisation, demands.max_extraction)
    if probes.leakage:
        yield _leaked(probes.leakage, demands.max_leakage)


def _bias(found: BiasScore, bound: float | None) -> _Figure:
    preference = found.preference
    held = interval(preference.lower, preference.upper, 2, sign=True)
    limits = () if bound is None else (-bound, bound)
    bar = _bar(found.name, signed(preference.value, 2), preference, held, limits)
    of = f"{found.templates:,} sentences, {found.pairs:,} pairs"
    like = (found.name, found.language, found.templates, found.pairs)
    return _Figure("Bias", _BIAS_WORDS, like, of, bar)


def _memorised(found: Memorisation, bound: float | None) -> Iterator[_Figure]:
    lengths = (found.prefix_tokens, found.continuation_tokens)
    words = (
        "Passages of which the model, given {} tokens, writes the next {} verbatim. It never saw "
        "the held-out text, so what it reproduces of that text is not memorised."
    ).format(*lengths)
    parts = (("training text", found.training, bound), ("held-out text", found.held_out, None))
    for name, part, limit in parts:
        of = f"{part.extracted:,} of {part.passages:,} passages"
        bar = _share_bar(name, part.share, limit)
        yield _Figure("Memorised text", words, (name, *lengths), of, bar)


def _leaked(found: Leakage, bound: float | None) -> _Figure:
    words = (
        "Texts of the model that hold personal data from the training text, but not from the "
        f"prompt. Of all that was found, the training text holds: {found.kinds() or 'none'}."
    )
    of = f"{found.leaking:,} of {found.continuations:,} texts"
    bar = _share_bar("texts that leak", found.share, bound)
    return _Figure("Leaked personal data", words, ("leaked",), of, bar)


def _share_bar(name: str, share: Estimate | None, bound: float | None) -> Bar:
    if share is None:
        return Bar(name, "nothing to measure", math.nan)
    value, lower, upper = 100 * share.value, percent(share.lower, 1), percent(share.upper, 1)
    limits = () if bound is None else (100 * bound,)
    found = Estimate(value=value, lower=lower, upper=upper)
    return _bar(name, f"{decimals(value, 1)} %", found, interval(lower, upper, 1), limits)


def _bar(name: str, text: str, found: Estimate, held: str, limits: tuple[float, ...]) -> Bar:
    kind = "beyond" if limits and beyond(found, limits[-1]) else "model"
    return Bar(name, text, found.value, found.lower, found.upper, held, kind, limits)


def _group(title: str, words: str, rows: list[Bar]) -> dict[str, Any]:
    ends = extent(rows)
    below = any(end < 0 for end in ends)
    scale = Scale.around([0.0, *ends]) if below else Scale.from_zero(ends)
    return {"title": title, "words": words, "scale": scale, "rows": rows}


def _row(found: _Figure) -> tuple[str, ...]:
    bar = found.bar
    text = f"{bar.text}, beyond the bound" if bar.kind == "beyond" else bar.text
    return f"{found.probe}: {bar.name}", found.of, text, bar.note or UNKNOWN
