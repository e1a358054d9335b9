"""One table of all results, and whether the machine is accepted."""

from typing import Any

from tests.gpu_acceptance.flow import ENDED

_COLUMNS = ("part", "goal", "figure", "ratio", "state", "what limits")


def table(results: list[dict[str, Any]]) -> str:
    """As text, a row a part; fake figures say so above and below."""
    rows = [_COLUMNS, *map(_row, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if results and results[0]["device"].startswith("FAKE"):
        warning = "FAKE: tiny models on a CPU; no figure here says anything about a GPU"
        return "\n".join([warning, *lines, warning])
    seconds = sum(each["seconds"] for each in results)
    return "\n".join([*lines, f"{results[0]['device']}: {seconds:.0f} seconds" if results else ""])


def accepted(results: list[dict[str, Any]]) -> bool:
    """Whether all parts ended, and those whose goal must be reached did reach it."""
    return all(
        each["state"] in ENDED and (each["state"] == "reached" or not each["must"])
        for each in results
    )


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    figure, ratio = result["figure"], result["ratio"]
    return (
        result["part"],
        result["goal"] + " (must)" * result["must"],
        "" if figure is None else f"{figure:,.4g} {result['unit']}",
        "" if ratio is None else f"{ratio:.3g}",
        result["state"],
        result["limits"],
    )
