"""The training curve as a file: one JSON line a report."""

import json
from pathlib import Path

from pipelines.core.storage import write_text


class History:
    """The points of a run; a resumed run goes on where its checkpoint was."""

    def __init__(self, path: Path) -> None:
        """Read the points that are there; half a line at the end is dropped."""
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines(True) if path.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]
        self.points: list[dict[str, float]] = [json.loads(line) for line in whole]
        self._torn = len(whole) < len(lines)

    @property
    def last_step(self) -> int:
        """The step of the last point; 0 before the first."""
        return int(self.points[-1]["step"]) if self.points else 0

    def add(self, point: dict[str, float]) -> None:
        """Append a point; those of its step and later ones are from before a failure and go."""
        kept = [old for old in self.points if old["step"] < point["step"]]
        rewrite = self._torn or len(kept) < len(self.points)
        self.points = [*kept, point]
        if rewrite:
            write_text(self._path, "".join(map(_line, self.points)))
            self._torn = False
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(point))


def _line(point: dict[str, float]) -> str:
    return json.dumps(point) + "\n"
