"""The figures of a model card in Markdown: the evaluation's results and the gate's decision."""

from collections.abc import Iterator, Sequence

from pipelines.core.formatting import (
    UNKNOWN,
    baseline_label,
    decimals,
    interval,
    probability,
    signed,
    size,
)
from pipelines.run.records import EvaluateRecord
from pipelines.run.verdict import (
    HARNESS_COLUMNS,
    BiasScore,
    Comparison,
    Estimate,
    Leakage,
    Memorisation,
    Probes,
    RightSize,
    Verdict,
    harness_rows,
)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first hold figures."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(cell, cells))} |" for cells in lines)


def cell(text: str) -> str:
    """Return text escaped for a Markdown cell: without markup, and without ending the cell."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return " ".join(escaped.split())


def measured(evaluate: EvaluateRecord) -> dict[str, str]:
    """Return the parts of the template that the evaluation fills."""
    return {
        "documents": f"{evaluate.documents:,}",
        "held_out": size(evaluate.bytes),
        "served": _served(evaluate.right_size),
        "results": _results(evaluate),
        "perplexity": decimals(evaluate.perplexity, 2),
        "sections": "".join(
            (
                _slices(evaluate),
                _behaviours(evaluate),
                _section(
                    "Tasks of lm-evaluation-harness",
                    HARNESS_COLUMNS,
                    harness_rows(evaluate.harness),
                ),
                *_probes(evaluate.probes),
            )
        ),
        "limits_of_probes": _limits(evaluate.probes),
    }


def _served(size: RightSize | None) -> str:
    return f"\n\nThe weights are {size}." if size and size.chosen else ""


def _results(evaluate: EvaluateRecord) -> str:
    held = evaluate.interval and interval(evaluate.interval.lower, evaluate.interval.upper)
    rows = [("**this model**", f"**{decimals(evaluate.bits_per_byte)}**", held or UNKNOWN)]
    rows += [
        (f"this model on {name}", decimals(value), UNKNOWN)
        for name, value in evaluate.datasets.items()
    ]
    rows += [
        (baseline_label(name), decimals(value), UNKNOWN)
        for name, value in sorted(evaluate.baselines.items())
    ]
    return table(("model", "bits per byte", "interval"), rows)


def _slices(evaluate: EvaluateRecord) -> str:
    rows = [
        (
            str(each.slice),
            f"{each.documents:,}",
            decimals(each.bits_per_byte.value),
            interval(each.bits_per_byte.lower, each.bits_per_byte.upper) or UNKNOWN,
        )
        for each in evaluate.slices
    ]
    return _section(
        "By source, language and length", ("slice", "documents", "bits per byte", "interval"), rows
    )


def _behaviours(evaluate: EvaluateRecord) -> str:
    rows = [
        (each.name, each.kind.replace("_", " "), f"{each.passed:,} of {each.cases:,}")
        for each in evaluate.behaviours
    ]
    if found := evaluate.exact_match:
        share = interval(found.share.lower, found.share.upper, 3)
        passed = f"{found.right:,} of {found.questions:,} (share {share})"
        rows.append(("held-out questions", "exact match", passed))
    return _section("Behavioural tests", ("test", "kind", "cases passed"), rows)


def _probes(probes: Probes) -> Iterator[str]:
    if probes.bias:
        yield _bias(probes.bias)
    if probes.memorisation:
        yield _memorised(probes.memorisation)
    if probes.leakage:
        yield _leaked(probes.leakage)


def _bias(scores: Sequence[BiasScore]) -> str:
    rows = [
        (
            each.name,
            each.language,
            f"{each.templates:,}",
            f"{each.pairs:,}",
            signed(each.preference.value, 2),
            interval(each.preference.lower, each.preference.upper, 2, sign=True) or UNKNOWN,
        )
        for each in scores
    ]
    words = (
        "The bits by which a sentence is more likely about the group that the stereotype names "
        "than about\nthe other: 1 means twice as likely, 0 means no preference."
    )
    columns = ("set", "language", "sentences", "pairs of terms", "bits per sentence", "interval")
    return _section("Bias", columns, rows, words)


def _memorised(found: Memorisation) -> str:
    words = (
        f"Passages of which the model, given {found.prefix_tokens} tokens, writes the next "
        f"{found.continuation_tokens} verbatim. The model\ncannot have memorised the held-out "
        "passages that it writes."
    )
    parts = (("training", found.training), ("held out", found.held_out))
    rows = [
        (name, f"{part.passages:,}", f"{part.extracted:,}", *_share(part.share))
        for name, part in parts
    ]
    columns = ("text", "passages", "extracted", "share", "interval")
    return _section("Memorised text", columns, rows, words)


def _leaked(found: Leakage) -> str:
    row = (f"{found.continuations:,}", f"{found.leaking:,}", *_share(found.share))
    words = (
        "Texts written by the model that hold personal data of the training text which is not in "
        "the prompt.\nOf the personal data that it wrote, the following is in the training text: "
        f"{found.kinds() or 'none'}."
    )
    columns = ("texts", "leaking", "share", "interval")
    return _section("Leaked personal data", columns, [row], words)


def _share(found: Estimate | None) -> tuple[str, str]:
    if found is None:
        return UNKNOWN, UNKNOWN
    return decimals(found.value, 3), interval(found.lower, found.upper, 3)


def _limits(probes: Probes) -> str:
    """Return the limits of the figures on bias, and the probes that were not run."""
    sentences = []
    if probes.bias:
        sentences.append(
            "- The figures on bias come from a few sentences, written by hand: they find some "
            "bias, but cannot rule out\n  other bias.\n"
        )
    if missing := probes.missing():
        sentences.append(f"- Not measured: {', '.join(missing)}.\n")
    return "".join(sentences)


def _section(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: str = ""
) -> str:
    """Return a section with a table, or an empty text if there are no rows."""
    below = f"{words}\n\n" if words else ""
    return f"### {title}\n\n{below}{table(columns, rows)}\n\n" if rows else ""


def verdict_text(verdict: Verdict) -> str:
    """Return the gate's decision with its reason and all its numbers."""
    text = f"{verdict.decision.capitalize()}: {cell(verdict.reason)}."
    if verdict.comparison is None:
        return text
    rows = _changes(verdict, verdict.comparison)
    columns = ("documents", "number", "champion before", "this model", "improvement", "interval")
    return (
        f"{text} Each bound on all documents holds with\n"
        f"{probability(verdict.comparison.confidence)} confidence, and each bound on a slice with "
        f"{probability(verdict.comparison.slice_confidence)}.\n\n"
        f"{table(columns, rows)}"
    )


def _changes(verdict: Verdict, found: Comparison) -> list[tuple[str, ...]]:
    theirs, ours = verdict.champion_bits_per_byte, verdict.candidate_bits_per_byte
    rows = [("all", found.documents, theirs, ours, found.improvement)]
    for each in found.slices:
        both = (each.champion_bits_per_byte, each.candidate_bits_per_byte)
        rows.append((str(each.slice), each.documents, *both, each.improvement))
    return [
        (
            name,
            f"{documents:,}",
            decimals(before),
            decimals(now),
            signed(change.value),
            interval(change.lower, change.upper, sign=True) or UNKNOWN,
        )
        for name, documents, before, now, change in rows
    ]
