"""What a person reads of an evaluation: the loss curve and one page that needs nothing else."""

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.core.figures import baseline_label, short, size
from pipelines.core.records import EvaluateRecord, PreprocessRecord, TrainRecord
from pipelines.core.storage import write_text
from pipelines.core.verdict import Estimate
from pipelines.evaluation.report_page import BEHAVIOUR, PAGE
from pipelines.evaluation.slices import LEAST_DOCUMENTS

_EXTREMES = 5  # best and worst documents shown, each
_NO_SLICES = '<tr><td colspan="5">Too few documents, or too much alike, to part.</td></tr>\n'


@dataclass(frozen=True)
class Evaluation:
    """All that the page shows."""

    record: EvaluateRecord
    preprocess: PreprocessRecord
    train: TrainRecord
    scores: pa.Table  # doc_id, bytes, tokens, nats
    documents: pa.Table  # doc_id, source, in the same order
    samples: Sequence[Mapping[str, str]]  # prompt, continuation
    fitted_bytes: int  # of training text, that the n-grams were fitted on


def write_report(evaluation: Evaluation, loss_curve: Path, path: Path) -> None:
    """Write the page: HTML with its styles and its picture inside."""
    record, train = evaluation.record, evaluation.train
    page = PAGE.substitute(
        bits_per_byte=f"{record.bits_per_byte:.3f}",
        perplexity=f"{record.perplexity:,.2f}",
        parameters=short(train.parameters),
        tokens=short(train.tokens),
        steps=f"{train.steps:,}",
        documents=f"{record.documents:,}",
        held_out=size(record.bytes),
        interval=_interval(record.interval),
        bars="".join(_bars(record)),
        slices="".join(_slices(record)) or _NO_SLICES,
        least_documents=LEAST_DOCUMENTS,
        fitted=_fitted(evaluation.fitted_bytes, evaluation.preprocess.dataset.train.bytes),
        behaviour=_behaviour(record),
        curve=base64.b64encode(loss_curve.read_bytes()).decode(),
        splits="".join(_splits(evaluation.preprocess)),
        dropped=escape(_dropped(evaluation.preprocess.stats)),
        samples="".join(_sample(sample) for sample in evaluation.samples),
        extremes="".join(_extremes(evaluation)),
    )
    write_text(path, page)


def _bars(record: EvaluateRecord) -> Iterator[str]:
    """The model among its yardsticks, the fewest bits first."""
    rows = [(value, baseline_label(name), "") for name, value in record.baselines.items()]
    rows.append((record.bits_per_byte, "this model", "model"))
    longest = max(value for value, _, _ in rows)
    for value, label, kind in sorted(rows):
        yield (
            f'<tr class="{kind}"><th scope="row">{escape(label)}</th><td class="bar">'
            f'<i style="width:{100 * value / longest:.1f}%"></i></td>'
            f'<td class="number">{value:.3f}</td></tr>\n'
        )


def _slices(record: EvaluateRecord) -> Iterator[str]:
    """Rows of the slices under their dimension's name; the light part of a bar is its interval."""
    scores = [each.bits_per_byte for each in record.slices]
    longest = max((each.upper or each.value for each in scores), default=1.0)
    for dimension, group in groupby(record.slices, lambda each: each.slice.dimension):
        yield f'<tr class="group"><th colspan="5" scope="rowgroup">{dimension}</th></tr>\n'
        for each in group:
            found = each.bits_per_byte
            lower = found.value if found.lower is None else found.lower
            upper = found.value if found.upper is None else found.upper
            sure, unsure = (100 * width / longest for width in (lower, upper - lower))
            yield (
                f'<tr><th scope="row">{escape(each.slice.name)}</th>'
                f"{_number(f'{each.documents:,}')}{_number(size(each.bytes))}"
                f'<td class="bar"><i style="width:{sure:.1f}%"></i>'
                f'<i class="unsure" style="width:{unsure:.1f}%"></i></td>'
                f"{_number(f'{found.value:.3f}{_interval(found)}')}</tr>\n"
            )


def _behaviour(record: EvaluateRecord) -> str:
    """The section of the recipe's tests and questions, where it has any."""
    rows = [
        f'<tr><th scope="row">{escape(each.name)}</th><td>{each.kind.replace("_", " ")}</td>'
        f"{_number(f'{each.passed:,} of {each.cases:,}')}</tr>\n"
        for each in record.behaviours
    ]
    if found := record.exact_match:
        passed = f"{found.right:,} of {found.questions:,}"
        rows.append(
            '<tr><th scope="row">held-out questions</th><td>exact match</td>'
            f"{_number(passed)}</tr>\n"
        )
    return BEHAVIOUR.substitute(rows="".join(rows)) if rows else ""


def _interval(found: Estimate | None) -> str:
    """` (2.031 to 2.214)`, or nothing where there is none."""
    if found is None or found.lower is None or found.upper is None:
        return ""
    return f" ({found.lower:.3f} to {found.upper:.3f})"


def _fitted(fitted: int, training: int) -> str:
    """Of which training text the n-grams know: all that the model saw, or a sample of it."""
    if fitted == training:
        return f"all {size(training)} of the training text"
    return f"a sample of {size(fitted)} from the training text's {size(training)}"


def _splits(preprocess: PreprocessRecord) -> Iterator[str]:
    dataset = preprocess.dataset
    for name, split in (("training", dataset.train), ("held out", dataset.validation)):
        yield (
            f'<tr><th scope="row">{name}</th>{_number(f"{split.documents:,}")}'
            f"{_number(size(split.bytes))}{_number(f'{split.tokens:,}')}"
            f"{_number(f'{split.bytes / split.tokens:.2f}')}</tr>\n"
        )


def _dropped(stats: Mapping[str, Any]) -> str:
    """`6 of 95 documents were dropped: 4 duplicate, 2 empty.`"""
    documents = stats["documents"]
    dropped: Mapping[str, int] = documents["dropped"]
    if not dropped:
        return f"None of {documents['in']:,} documents was dropped."
    reasons = ", ".join(
        f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(dropped.items())
    )
    return f"{sum(dropped.values()):,} of {documents['in']:,} documents were dropped: {reasons}."


def _sample(sample: Mapping[str, str]) -> str:
    prompt, text = escape(sample["prompt"]), escape(sample["continuation"])
    # A newline right after <pre> would be swallowed; the first tag keeps it from being one.
    return f"<pre><b>{prompt}</b>{text}</pre>\n"


def _extremes(evaluation: Evaluation) -> Iterator[str]:
    """Rows of the documents that the model predicts best, then of those it predicts worst."""
    sources = evaluation.documents["source"].to_pylist()
    rows = [
        (row["nats"] / math.log(2) / row["bytes"], source, row["bytes"])
        for row, source in zip(evaluation.scores.to_pylist(), sources, strict=True)
    ]
    rows.sort()
    shown = min(_EXTREMES, (len(rows) + 1) // 2)
    groups = (("best", rows[:shown]), ("worst", rows[shown:][-shown:][::-1]))
    for name, group in groups:
        if group:
            yield f'<tr class="group"><th colspan="3" scope="rowgroup">{name}</th></tr>\n'
        for bits, source, length in group:
            figures = _number(size(length)) + _number(f"{bits:.3f}")
            yield f"<tr><td>{escape(source)}</td>{figures}</tr>\n"


def _number(text: str) -> str:
    return f'<td class="number">{text}</td>'
