"""The training curve as a file: one JSON line a report."""

import json
from pathlib import Path
from typing import Any

from pipelines.core.line_file import LineFile

Point = dict[str, Any]  # `step`, and what StepMetrics.curve_point says of it


class History:
    """The points of a run; a resumed run goes on where its checkpoint was."""

    def __init__(self, path: Path) -> None:
        """Read the points that are there; half a line at the end is dropped."""
        self._file = LineFile(path)
        self.points: list[Point] = [json.loads(line) for line in self._file.read()]

    @property
    def last_step(self) -> int:
        """The step of the last point; 0 before the first."""
        return int(self.points[-1]["step"]) if self.points else 0

    def add(self, point: Point) -> None:
        """Append a point; those of its step and later ones are from before a failure and go."""
        kept = [old for old in self.points if old["step"] < point["step"]]
        went_back = len(kept) < len(self.points)
        self.points = [*kept, point]
        if went_back:
            self._file.replace(self.lines())
        else:
            self._file.append(json.dumps(point))

    def lines(self) -> list[str]:
        """All points as they are written, also what the disk has no room for yet."""
        return [json.dumps(point) for point in self.points]
