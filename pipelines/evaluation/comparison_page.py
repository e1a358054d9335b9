"""The compare page: a candidate beside the champion, and the reasons for the gate's decision.

It is written for every verdict. If there is no champion, or no comparison with it, the page says
so and shows what is known about the candidate alone. It also shows what the candidate cost, stage
by stage, and the price of its improvement.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipelines.core.formatting import (
    UNKNOWN,
    amount,
    decimals,
    duration,
    interval,
    percent,
    probability,
    short,
    signed,
    significant,
    size,
)
from pipelines.evaluation.comparison_charts import Side, changes, loss, rejects
from pipelines.evaluation.html_page import Table, render
from pipelines.evaluation.probe_charts import (
    harness_table,
    probe_charts,
    served_table,
    slice_chart,
    yardstick_chart,
)
from pipelines.recipe.recipe import Register
from pipelines.run.records import EvaluateRecord, stage_names
from pipelines.run.verdict import BehaviourChange, Verdict

_UNITS = (("money", "cost"), ("gpu_hours", "GPU-hours"), ("worker_hours", "worker-hours"))


def cost_table(candidate: Side, champion: Side | None) -> Table:
    """Return the time and cost of each stage, the champion's beside the candidate's."""
    key, unit = _unit(candidate)
    sides = [candidate, champion] if champion else [candidate]
    rows = [
        (stage, *(text for side in sides for text in _cells(side, stage, key)))
        for stage in _counted()
    ]
    totals = ({each: _total(side, each) for each in ("seconds", key)} for side in sides)
    rows.append(("total", *(text for total in totals for text in _texts(total, key))))
    names = ["candidate", unit, *(["champion", unit] if champion else [])]
    return Table(("stage", *names), rows, total=True)


def cost_note(candidate: Side, champion: Side | None) -> str:
    """Return the explanation of the marks in the cost table."""
    note = f"{UNKNOWN}: the result came from the stage cache, or the cost is not known."
    if candidate.training or (champion and champion.training):
        note += " *: an earlier run trained the model, and its cost is shown."
    return note


def bought(verdict: Verdict, candidate: Side) -> str:
    """Return a text such as `29.4 GPU-hours bought 3.20 % fewer bits per byte: 9.19 a percent`."""
    key, unit = _unit(candidate)
    total = _total(candidate, key)
    spent = f"A cost of {amount(total)}" if key == "money" else f"{amount(total)} {unit}"
    found, theirs = verdict.comparison, verdict.champion_bits_per_byte
    if found is None or theirs is None:
        return f"{spent} in total. Nothing was compared, so an improvement has no price."
    improvement = found.improvement
    share, lower, upper = (
        percent(each, theirs) for each in (improvement.value, improvement.lower, improvement.upper)
    )
    if not share or share <= 0:
        return f"{spent} bought nothing: {signed(share, 2)} % of the champion's bits per byte."
    price = f"{amount(total / share)} a percent"
    if lower and upper and lower > 0:
        price += f", {amount(total / upper)} to {amount(total / lower)} within the interval"
    return f"{spent} bought {decimals(share, 2)} % fewer bits per byte: {price}."


def _unit(candidate: Side) -> tuple[str, str]:
    """Return money if a price is known, else GPU-hours if there are any, else worker-hours."""
    return next((unit for unit in _UNITS if _total(candidate, unit[0])), _UNITS[-1])


def _counted() -> tuple[str, ...]:
    """Return all stages except the last: register is still running when the page is written."""
    return stage_names()[:-1]


def _total(side: Side, key: str) -> float:
    return sum(side.cost(stage).get(key, 0.0) for stage in _counted())


def _cells(side: Side, stage: str, key: str) -> tuple[str, str]:
    time, spent = _texts(side.cost(stage), key)
    return (f"{time}*" if stage == "train" and side.training else time), spent


def _texts(found: Mapping[str, float], key: str) -> tuple[str, str]:
    if not found.get("seconds"):
        return UNKNOWN, UNKNOWN
    return duration(found["seconds"]), amount(found.get(key))


_MARKS = {
    "promoted": "\N{CHECK MARK}",
    "refused": "\N{BALLOT X}",
    "needs approval": "?",
    "unchanged": "=",
}
_NOT_COMPARED = {
    "unchanged": "Candidate and champion are the same model.",
    "refused": "Nothing was compared with the champion.",
}


def compare_page(
    verdict: Verdict,
    demands: Register,
    record: EvaluateRecord,
    candidate: Side,
    champion: Side | None,
) -> str:
    """Return the page as HTML.

    Args:
        verdict: The gate's verdict.
        demands: The recipe's requirements for a champion.
        record: The measurements of the candidate.
        candidate: The model that was trained.
        champion: The model that was champion when the gate decided, if there was one.
    """
    values = {
        **_head(verdict, demands, candidate, champion),
        "tiles": list(_tiles(verdict, record, candidate)),
        "changes": changes(verdict, demands),
        "not_compared": _NOT_COMPARED.get(verdict.decision, "") if champion else "",
        "slices": slice_chart(record),
        "yardsticks": yardstick_chart(record, "candidate", verdict.champion_bits_per_byte),
        "loss": loss(candidate, champion),
        "behaviours": _behaviours(verdict, record),
        "tasks": _tasks(verdict),
        "harness": harness_table(record),
        "served": str(record.right_size or ""),
        "served_checks": served_table(record),
        "probes": probe_charts(candidate.probes, demands, champion.probes if champion else None),
        "samples": _samples(candidate, champion),
        "judgement": str(verdict.judgement or ""),
        "bought": bought(verdict, candidate),
        "costs": cost_table(candidate, champion),
        "cost_note": cost_note(candidate, champion),
        "rejects": rejects(candidate),
        "glance": _glance(candidate, champion),
        "differences": _differences(candidate, champion),
        "no_differences": _no_differences(champion),
        "verdict_json": json.dumps(significant(verdict.model_dump()), indent=2),
    }
    return render("comparison.html.j2", values)


def _head(
    verdict: Verdict, demands: Register, candidate: Side, champion: Side | None
) -> dict[str, Any]:
    return {
        "model": demands.model_name,
        "recipe": candidate.fact("recipe", "name") or UNKNOWN,
        "champion": champion.name if champion else None,
        "verdict": verdict,
        "mark": _MARKS[verdict.decision],
    }


def _tiles(
    verdict: Verdict, record: EvaluateRecord, candidate: Side
) -> Iterator[tuple[str, str, str]]:
    """Yield the value, label and kind of each main figure."""
    held = record.interval and interval(record.interval.lower, record.interval.upper)
    label = f"bits per byte ({held})" if held else "bits per byte"
    yield decimals(verdict.candidate_bits_per_byte), label, "first"
    theirs = verdict.champion_bits_per_byte
    if theirs is not None:
        yield decimals(theirs), "of the champion", "theirs"
    if (found := verdict.comparison) and theirs is not None:
        lower = percent(found.improvement.lower, theirs)
        least = (
            f", at least {signed(lower, 2)} % at {probability(found.confidence)}" if lower else ""
        )
        yield f"{signed(percent(found.improvement.value, theirs), 2)} %", f"improvement{least}", ""
        yield f"{found.better_on:,}", f"of {found.documents:,} documents are better", ""
    else:
        yield f"{record.documents:,}", f"held-out documents, {size(record.bytes)}", ""
    yield short(candidate.fact("records", "train", "parameters")), "parameters", ""
    yield short(candidate.fact("records", "train", "tokens")), "tokens trained on", ""


def _behaviours(verdict: Verdict, record: EvaluateRecord) -> Table | None:
    """Return how many cases of each of the recipe's tests pass, or None if it has no tests."""
    if verdict.comparison and verdict.comparison.behaviours:
        compared = [_compared(each) for each in verdict.comparison.behaviours]
        return Table(("test", "cases", "candidate passes", "champion passes"), compared)
    alone = [(each.name, f"{each.cases:,}", f"{each.passed:,}") for each in record.behaviours]
    return Table(("test", "cases", "candidate passes"), alone) if alone else None


def _tasks(verdict: Verdict) -> Table | None:
    """Return how both models did on the tasks that the recipe limits, question by question."""
    changes = verdict.comparison.tasks if verdict.comparison else ()
    columns = ("task", "questions", "champion", "candidate", "improvement", "interval")
    rows = [
        (
            f"{each.task} (worse than allowed)" if each.regressed else each.task,
            f"{each.questions:,}, better on {each.better_on:,}, worse on {each.worse_on:,}",
            decimals(each.champion),
            decimals(each.candidate),
            signed(each.improvement.value),
            interval(each.improvement.lower, each.improvement.upper, sign=True) or UNKNOWN,
        )
        for each in changes
    ]
    return Table(columns, rows) if rows else None


def _compared(change: BehaviourChange) -> tuple[str, ...]:
    fewer = change.candidate_passed < change.champion_passed
    ours = f"fewer: {change.candidate_passed:,}" if fewer else f"{change.candidate_passed:,}"
    return change.name, f"{change.cases:,}", ours, f"{change.champion_passed:,}"


def _samples(candidate: Side, champion: Side | None) -> list[tuple[str, str, str | None]]:
    """Return each prompt with the texts that the candidate and the champion wrote after it."""
    theirs = champion.samples if champion else {}
    return [(prompt, text, theirs.get(prompt)) for prompt, text in candidate.samples.items()]


def _glance(candidate: Side, champion: Side | None) -> Table:
    """Return the table of the facts that a user wants to know first about two models."""
    sides = [candidate, champion] if champion else [candidate]

    def row(name: str, form: Callable[[Any], str], *path: str) -> tuple[str, ...]:
        values = (side.fact(*path) for side in sides)
        return name, *(UNKNOWN if value is None else form(value) for value in values)

    train, evaluate = ("records", "train"), ("records", "evaluate")
    dataset = ("records", "preprocess", "dataset")
    rows = [
        row("parameters", "{:,}".format, *train, "parameters"),
        row("optimizer steps", "{:,}".format, *train, "steps"),
        row("tokens trained on", "{:,}".format, *train, "tokens"),
        row("layout", _layout, *train, "layout"),
        row("training text", size, *dataset, "train", "bytes"),
        row("training documents", "{:,}".format, *dataset, "train", "documents"),
        row("vocabulary", "{:,}".format, *dataset, "vocab_size"),
        row("perplexity a token", lambda value: decimals(value, 2), *evaluate, "perplexity"),
        row("held-out questions", _answered, *evaluate, "exact_match"),
        row("model content", _short_hash, *train, "model_hash"),
        row("commit", _short_hash, "run", "git_commit"),
        row("uncommitted changes", lambda dirty: "yes" if dirty else "no", "run", "dirty"),
        row("run", str, "run", "dag_run_id"),
    ]
    names = ("candidate", "champion") if champion else ("candidate",)
    return Table(("", *names), rows, numbers=False)


def _layout(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in found.items()) or UNKNOWN


def _answered(found: Mapping[str, Any]) -> str:
    return f"{found['right']:,} of {found['questions']:,} right"


def _short_hash(digest: str) -> str:
    return digest[:12]


def _differences(candidate: Side, champion: Side | None) -> Table:
    """Return the keys whose values differ between the recipes; none if a recipe is not known."""
    known = champion.fact("recipe") if champion else None
    ours, theirs = (
        dict(_leaves(each)) for each in ((candidate.fact("recipe"), known) if known else ({}, {}))
    )
    rows = [
        (key, ours.get(key, UNKNOWN), theirs.get(key, UNKNOWN))
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key)
    ]
    return Table(("key", "candidate", "champion"), rows, numbers=False)


def _no_differences(champion: Side | None) -> str:
    if champion and champion.fact("recipe"):
        return "There are none: both models have the same recipe."
    return "The champion's recipe is not known."


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the JSON value of each leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False)
