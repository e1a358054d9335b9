"""What a candidate cost, stage by stage, and the price of its improvement."""

from collections.abc import Mapping

from pipelines.core.figures import UNKNOWN, amount, decimals, duration, percent, signed
from pipelines.core.records import STAGES
from pipelines.core.verdict import Verdict
from pipelines.evaluation.compare_side import Side
from pipelines.evaluation.page import Table

_UNITS = (("money", "cost"), ("gpu_hours", "GPU-hours"), ("worker_hours", "worker-hours"))
_COUNTED = STAGES[:-1]  # register is under way while this is written


def cost_table(candidate: Side, champion: Side | None) -> Table:
    """Time and cost of each stage, the champion's beside the candidate's."""
    key, unit = _unit(candidate)
    sides = [candidate, champion] if champion else [candidate]
    rows = [
        (stage, *(text for side in sides for text in _cells(side, stage, key)))
        for stage in _COUNTED
    ]
    totals = ({each: _total(side, each) for each in ("seconds", key)} for side in sides)
    rows.append(("in all", *(text for total in totals for text in _texts(total, key))))
    names = ["candidate", unit, *(["champion", unit] if champion else [])]
    return Table(("stage", *names), rows, total=True)


def cost_note(candidate: Side, champion: Side | None) -> str:
    """What the marks in the table mean."""
    note = f"{UNKNOWN}: out of the stage cache, or not known."
    if candidate.training or (champion and champion.training):
        note += " *: trained by an earlier run, whose cost it is."
    return note


def bought(verdict: Verdict, candidate: Side) -> str:
    """`29.4 GPU-hours bought 3.20 % fewer bits per byte: 9.19 a percent`."""
    key, unit = _unit(candidate)
    total = _total(candidate, key)
    spent = f"A cost of {amount(total)}" if key == "money" else f"{amount(total)} {unit}"
    found, theirs = verdict.comparison, verdict.champion_bits_per_byte
    if found is None or theirs is None:
        return f"{spent} in all. Nothing was compared, so there is no price of an improvement."
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
    """Money where it has a price, else the hours of what is scarcer."""
    return next((unit for unit in _UNITS if _total(candidate, unit[0])), _UNITS[-1])


def _total(side: Side, key: str) -> float:
    return sum(side.cost(stage).get(key, 0.0) for stage in _COUNTED)


def _cells(side: Side, stage: str, key: str) -> tuple[str, str]:
    time, spent = _texts(side.cost(stage), key)
    return (f"{time}*" if stage == "train" and side.training else time), spent


def _texts(found: Mapping[str, float], key: str) -> tuple[str, str]:
    if not found.get("seconds"):
        return UNKNOWN, UNKNOWN
    return duration(found["seconds"]), amount(found.get(key))
