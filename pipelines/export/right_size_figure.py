"""The variants of a model as a picture: bits per byte over memory and over loading time."""

from collections.abc import Sequence
from pathlib import Path

from pipelines.export.right_size import GB, Budget, Judged
from pipelines.planning.memory import HEADROOM

_INK, _GOOD, _BAD = "#808080", "#2a9d8f", "#d1495b"  # seen on a light page and on a dark one


def draw_right_size(judged: Sequence[Judged], budget: Budget, path: Path) -> None:
    """Draw bits per byte over serving memory and over load time, as a PNG.

    What fits the budget and loses little enough is drawn green; the budget itself is a line.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    memory, loading = figure.subplots(1, 2, sharey=True)
    for each in judged:
        colour = _GOOD if each.fits and each.good else _BAD
        for axes, x in (
            (memory, each.memory.total / GB),
            (loading, each.variant.load_seconds),
        ):
            axes.plot(x, each.variant.bits_per_byte, "o", color=colour)
            axes.annotate(
                each.variant.name,
                (x, each.variant.bits_per_byte),
                (6, 4),
                textcoords="offset points",
                color=_INK,
            )
    memory.axvline(budget.gb * HEADROOM, color=_INK, linestyle="--", linewidth=1)
    memory.set_xlabel(f"GB to serve {budget.sequences} x {budget.tokens:,} tokens", color=_INK)
    memory.set_ylabel("bits per byte", color=_INK)
    loading.set_xlabel("seconds to load", color=_INK)
    for axes in (memory, loading):
        axes.set_xlim(left=0)
        axes.margins(0.15)
        axes.tick_params(colors=_INK)
        axes.grid(color=_INK, alpha=0.25)
        axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, transparent=True)
