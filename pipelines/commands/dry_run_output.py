"""Printing of a dry run beside what the planner's formulas say."""

from typing import Any

from rich.console import Console
from rich.table import Table

from pipelines.planning.layout_search import GIB

_WIDTH = 100  # if the output is not a terminal


def print_dry_run(tried: dict[str, Any]) -> None:
    """Print the values of `report_json`: the fullest rank's memory first, then each rank's step."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    ranks = tried["ranks"]
    fullest = max(ranks, key=lambda each: sum(each["memory"].values()))
    console.print()
    number = f"{len(ranks)} ranks, one of each stage," if len(ranks) > 1 else "one rank"
    console.print(f"dry run of {number} in {tried['seconds']:.0f} s: {_compute(ranks)}")
    console.print(_memory(fullest, tried))
    console.print()
    console.print(_collectives(ranks))
    for line in _waits(ranks):
        console.print(line)


def _compute(ranks: list[dict[str, Any]]) -> str:
    flops = max(each["flops"] for each in ranks)
    return f"{flops:.3g} FLOPs a step and GPU, graphs compiled: {ranks[0]['graphs']}"


def _memory(fullest: dict[str, Any], tried: dict[str, Any]) -> Table:
    table = _table("GiB at the peak", "dry run", "formula")
    formula = tried["formula_bytes"]
    for part, size in formula.items():
        table.add_row(part, _gib(fullest["memory"].get(part, 0)), _gib(size))
    error = f"{_gib(sum(formula.values()))} ({tried['formula_error']:+.1%})"
    table.add_row(f"all, rank {fullest['rank']}", _gib(tried["peak_bytes"]), error)
    return table


def _collectives(ranks: list[dict[str, Any]]) -> Table:
    table = _table("collectives of a step", "group", "GiB", "count")
    for rank in ranks:
        for each in rank["collectives"]:
            kind = f"rank {rank['rank']}: {each['kind']}" if len(ranks) > 1 else each["kind"]
            group = f"{each['group']}({each['size']})"
            table.add_row(kind, group, _gib(each["bytes"]), str(each["count"]))
    return table


def _waits(ranks: list[dict[str, Any]]) -> list[str]:
    """Return a line for each place where the host waits."""
    lines = []
    for rank in ranks:
        for each in rank["waits"]:
            place = f"{each['file']}:{each['line']} in {each['function']}"
            why = each["reason"] or "[red]not known as a right one[/]"
            lines.append(f"host waits  {each['count']} x {each['kind']} at {place}: {why}")
    return list(dict.fromkeys(lines))


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:.3g}"
