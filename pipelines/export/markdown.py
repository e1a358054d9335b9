"""Markdown of a model card."""

from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; figures stand in all columns but the first."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(cell, cells))} |" for cells in lines)


def cell(text: str) -> str:
    """Text of data as Markdown shows it: no markup, and no end of the cell."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return " ".join(escaped.split())
