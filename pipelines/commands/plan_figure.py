"""A plan as a picture: the memory of each layout by part, beside what a device has."""

from html import escape
from io import StringIO
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.planning.plan import Plan
from pipelines.planning.search import GIB

_MOST = 12  # layouts in one picture
_INK = "#808080"  # seen on a light page and on a dark one
# By part, in the order of `Memory.parts`; Okabe and Ito's colours, told apart by everyone.
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#f0e442", "#cc79a7", "#b0b0b0")
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 16px sans-serif; margin: 2rem; color-scheme: light dark }}
svg {{ max-width: 100%; height: auto }}</style>
<h1>{title}</h1>
{picture}
</html>
"""


def draw_memory(plan: Plan, path: Path) -> None:
    """Draw a stacked bar a layout, those that fit first, as a PNG or as an HTML page.

    Raises:
        UserError: the file's name ends otherwise, or no layout is possible.
    """
    if path.suffix not in (".png", ".html"):
        raise UserError(f"--plot {path}: the name ends in .png or .html")
    shown = [each for each in plan.layouts if each.choice is not None][:_MOST]
    if not shown:
        raise UserError(f"--plot {path}: no layout divides the model, so there is nothing to draw")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 0.4 * len(shown)), layout="constrained")
    axes = figure.subplots()
    lefts = [0.0] * len(shown)
    parts = [each.choice.memory.parts for each in shown if each.choice is not None]
    for part, colour in zip(parts[0], _COLOURS, strict=True):
        sizes = [memory[part] / GIB for memory in parts]
        axes.barh(range(len(shown)), sizes, left=lefts, color=colour, label=part)
        lefts = [left + size for left, size in zip(lefts, sizes, strict=True)]
    axes.set_yticks(range(len(shown)), [each.name for each in shown], color=_INK)
    axes.invert_yaxis()
    axes.axvline(plan.machine.hardware.memory_bytes / GIB, color=_INK, linestyle="--")
    axes.set_xlabel("GiB a device; dashed: what it has", color=_INK)
    axes.tick_params(colors=_INK)
    axes.spines[:].set_visible(False)
    where = {"loc": "lower right", "bbox_to_anchor": (1, 1)}
    axes.legend(ncols=len(_COLOURS), frameon=False, labelcolor=_INK, **where)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        figure.savefig(path, dpi=160)
        return
    text = StringIO()
    figure.savefig(text, format="svg", transparent=True)
    title = f"Memory of {len(shown)} layouts on {plan.machine.gpus} x {plan.machine.hardware.name}"
    picture = text.getvalue().partition("<svg")
    path.write_text(_PAGE.format(title=escape(title), picture="<svg" + picture[2]))
