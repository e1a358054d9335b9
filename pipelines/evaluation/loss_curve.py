"""A run's training loss: as a picture, as a table for `dvc plots`, and in bits per byte.

A loss in nats a token compares only runs with the same tokenizer. In bits per byte, computed with
the training text's mean bytes per token, it compares all runs.
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipelines.core.storage import write_text
from pipelines.run.records import Split

CURVE = "loss_curve.csv"  # in evaluate's output, and among the run's artifacts
_INK, _LINE = "#7d8590", "#3b82c4"  # both readable on white and on black


class CurvePoint(NamedTuple):
    """The training loss at one step; nan if it was not a number."""

    step: int
    text_bytes: int  # of training text seen so far, counted again in every epoch
    loss: float  # nats a token
    bits_per_byte: float


def read_history(history: Path, training: Split) -> list[CurvePoint]:
    """Return the points that training wrote as JSON lines, with their figures in bytes of text."""
    bytes_per_token = training.bytes / training.tokens
    points = (json.loads(line) for line in history.read_text(encoding="utf-8").splitlines())
    return [
        CurvePoint(
            step=point["step"],
            text_bytes=round(point["tokens"] * bytes_per_token),
            loss=point["loss"],
            bits_per_byte=point["loss"] / math.log(2) / bytes_per_token,
        )
        for point in points
    ]


def write_curve(points: Sequence[CurvePoint], path: Path) -> None:
    """Write a CSV file with a header; a loss that is not a finite number is an empty cell."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(CurvePoint._fields)
    rows.writerows([value if math.isfinite(value) else "" for value in point] for point in points)
    write_text(path, text.getvalue())


def parse_curve(text: str) -> list[CurvePoint]:
    """Return the points that `write_curve` wrote."""
    return [
        CurvePoint(
            step=int(row["step"]),
            text_bytes=int(row["text_bytes"]),
            loss=float(row["loss"] or math.nan),
            bits_per_byte=float(row["bits_per_byte"] or math.nan),
        )
        for row in csv.DictReader(io.StringIO(text))
    ]


def draw_loss_curve(points: Sequence[CurvePoint], path: Path) -> None:
    """Draw the training loss over steps as a PNG.

    Its background is transparent and its colours are medium, to fit light and dark pages.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    steps, losses = ([getattr(point, key) for point in points] for key in ("step", "loss"))
    axes.plot(steps, losses, color=_LINE, linewidth=2, marker="o" if len(points) == 1 else "")
    axes.set_xlabel("optimizer step", color=_INK)
    axes.set_ylabel("training loss, nats a token", color=_INK)
    axes.tick_params(colors=_INK)
    axes.grid(color=_INK, alpha=0.25)
    axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, transparent=True)
