"""The report of an evaluation: one self-contained page."""

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipelines.core.formatting import UNKNOWN, decimals, interval, short, size
from pipelines.core.storage import write_text
from pipelines.evaluation.html_page import Table, render
from pipelines.evaluation.probe_charts import (
    harness_table,
    probe_charts,
    served_table,
    slice_chart,
    yardstick_chart,
)
from pipelines.evaluation.slices import LEAST_DOCUMENTS
from pipelines.run.records import EvaluateRecord, PreprocessRecord, TrainRecord

if TYPE_CHECKING:
    from pipelines.evaluation.preferences import Shown

_EXTREMES = 5  # how many of the best and of the worst documents are shown


@dataclass(frozen=True)
class Evaluation:
    """Everything that the page shows."""

    record: EvaluateRecord
    preprocess: PreprocessRecord
    train: TrainRecord
    scores: pa.Table  # doc_id, bytes, tokens, nats
    documents: pa.Table  # doc_id, source, in the same order
    samples: Sequence[Mapping[str, str]]  # prompt, continuation
    fitted_bytes: int  # of training text that the n-grams were fitted on
    pairs: "Sequence[Shown]" = ()


def write_report(evaluation: Evaluation, loss_curve: Path, path: Path) -> None:
    """Write the page as one HTML file that includes its styles and its picture."""
    record, preprocess = evaluation.record, evaluation.preprocess
    values = {
        "documents": f"{record.documents:,}",
        "held_out": size(record.bytes),
        "tiles": list(_tiles(record, evaluation.train)),
        "yardsticks": yardstick_chart(record, "this model"),
        "fitted": _fitted(evaluation.fitted_bytes, preprocess.dataset.train.bytes),
        "slices": slice_chart(record),
        "least_documents": LEAST_DOCUMENTS,
        "behaviours": _behaviours(record),
        "harness": harness_table(record),
        "metrics": _metrics(record),
        "served": str(record.right_size or ""),
        "served_checks": served_table(record),
        "probes": probe_charts(record.probes),
        "curve": base64.b64encode(loss_curve.read_bytes()).decode(),
        "samples": evaluation.samples,
        "pairs": _pairs(record, evaluation.pairs),
        "extremes": list(_extremes(evaluation)),
        "splits": _splits(preprocess),
        "dropped": _dropped(preprocess.stats),
    }
    write_text(path, render("report.html.j2", values))


def _tiles(record: EvaluateRecord, train: TrainRecord) -> Iterator[tuple[str, str, str]]:
    """Yield the value, label and kind of each main figure."""
    held = record.interval and interval(record.interval.lower, record.interval.upper, 3)
    label = f"bits per byte ({held})" if held else "bits per byte"
    yield decimals(record.bits_per_byte, 3), label, "first"
    yield decimals(record.perplexity, 2), "perplexity a token", ""
    yield short(train.parameters), "parameters", ""
    yield short(train.tokens), "tokens trained on", ""
    yield f"{train.steps:,}", "optimizer steps", ""


def _behaviours(record: EvaluateRecord) -> Table | None:
    """Return how many of the recipe's test cases and questions pass, or None if it has none."""
    rows = [
        (each.name, each.kind.replace("_", " "), f"{each.passed:,} of {each.cases:,}")
        for each in record.behaviours
    ]
    if found := record.exact_match:
        passed = f"{found.right:,} of {found.questions:,}"
        rows.append(("held-out questions", "exact match", passed))
    return Table(("test", "kind", "cases passed"), rows) if rows else None


def _pairs(record: EvaluateRecord, shown: "Sequence[Shown]") -> dict[str, Any] | None:
    """Return what the model prefers, and some pairs side by side; None if the data have none."""
    if not (found := record.pairs):
        return None
    short = found.right_of_short
    rows = [
        ("the chosen answer has the larger reward", f"{found.pairs:,}", str(found.right)),
        (
            "the same where the chosen answer is shorter",
            f"{found.short_pairs:,}",
            UNKNOWN if short is None else str(short),
        ),
    ]
    if found.drift is not None:
        rows.append(("nats a token from the first model", f"{found.pairs:,}", str(found.drift)))
    for name, value in (
        ("reward of the chosen minus that of the rejected", found.margin),
        ("reward of the chosen answer", found.reward_of_chosen),
        ("reward of the rejected answer", found.reward_of_rejected),
    ):
        rows.append((name, f"{found.pairs:,}", decimals(value)))
    return {
        "figures": Table(("held-out pairs", "pairs", "value"), rows),
        "shown": Table(
            ("prompt", "chosen", "rejected", "the model's answer"), shown, numbers=False
        ),
    }


def _metrics(record: EvaluateRecord) -> Table | None:
    """Return the figures of the metrics of a team's own packages, or None if there are none."""
    rows = [(name, decimals(value)) for name, value in record.metrics.items()]
    return Table(("metric", "value"), rows) if rows else None


def _fitted(fitted: int, training: int) -> str:
    """Return a text that says whether the n-grams know all training text or a sample of it."""
    if fitted == training:
        return f"all {size(training)} of the training text"
    return f"a sample of {size(fitted)} from the training text's {size(training)}"


def _splits(preprocess: PreprocessRecord) -> Table:
    dataset = preprocess.dataset
    rows = [
        (
            name,
            f"{split.documents:,}",
            size(split.bytes),
            f"{split.tokens:,}",
            f"{split.bytes / split.tokens:.2f}",
        )
        for name, split in (("training", dataset.train), ("held out", dataset.validation))
    ]
    return Table(("split", "documents", "text", "tokens", "bytes a token"), rows)


def _dropped(stats: Mapping[str, Any]) -> str:
    """Return a sentence like `6 of 95 documents were dropped: 4 duplicate, 2 empty.`"""
    documents = stats["documents"]
    dropped: Mapping[str, int] = documents["dropped"]
    if not dropped:
        return f"None of {documents['in']:,} documents was dropped."
    reasons = ", ".join(
        f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(dropped.items())
    )
    return f"{sum(dropped.values()):,} of {documents['in']:,} documents were dropped: {reasons}."


def _extremes(evaluation: Evaluation) -> Iterator[tuple[str, Table]]:
    """Yield the documents that the model predicts best, then those that it predicts worst."""
    sources = evaluation.documents["source"].to_pylist()
    rows = [
        (row["nats"] / math.log(2) / row["bytes"], source, row["bytes"])
        for row, source in zip(evaluation.scores.to_pylist(), sources, strict=True)
    ]
    rows.sort()
    shown = min(_EXTREMES, (len(rows) + 1) // 2)
    for name, group in (("best", rows[:shown]), ("worst", rows[shown:][-shown:][::-1])):
        cells = [(source, size(length), decimals(bits, 3)) for bits, source, length in group]
        if cells:
            yield name, Table(("source", "size", "bits per byte"), cells)
