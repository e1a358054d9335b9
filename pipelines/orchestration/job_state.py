"""Which generation of a task's Ray job counts: `jobs/<task>.json` in the workspace.

A retry stays in its generation and finds its job again. A person's Clear begins a new one: the job
of a finished task is not run again by itself, and that of a killed one must not be attached to.
"""

from dataclasses import dataclass
from pathlib import Path

from pipelines.core.storage import read_json, write_json


@dataclass(frozen=True)
class JobState:
    """The state of one task instance, in its file."""

    path: Path

    @classmethod
    def of(cls, workspace: Path, task_id: str, map_index: int) -> "JobState":
        """The state of a task instance; `map_index` is -1 for a task that is not mapped."""
        name = task_id if map_index < 0 else f"{task_id}-{map_index}"
        return cls(workspace / "jobs" / f"{name}.json")

    def generation(self) -> int:
        """The generation to run; a closed one is followed by the next."""
        generation, closed = self._read()
        if closed:
            generation += 1
            self._write(generation, closed=False)
        return generation

    def close(self) -> None:
        """Nothing of this generation is run or attached to again: it is finished, or killed."""
        self._write(self._read()[0], closed=True)

    def _read(self) -> tuple[int, bool]:
        if not self.path.exists():
            return 0, False
        values = read_json(self.path)
        return values["generation"], values["closed"]

    def _write(self, generation: int, *, closed: bool) -> None:
        write_json(self.path, {"generation": generation, "closed": closed})
