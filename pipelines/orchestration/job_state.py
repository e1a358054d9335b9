"""The Ray job of a task that counts: `jobs/<task>.json` in the workspace.

A retry stays in its generation and finds its job again. A user's Clear begins a new generation, in
which the task never attaches to the former job, over or not. Airflow distinguishes the two: only a
Clear raises a task instance's `max_tries`. Code that stops a job for a user also closes the
generation, because the Clear of a running task does not always raise `max_tries`.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipelines.core.checked_json import read_model
from pipelines.core.storage import one_at_a_time, write_json
from pipelines.run.records import JOBS


class OutdatedError(Exception):
    """This process of the task is from before a Clear."""


class OvertakenError(Exception):
    """Another process has noted another submission, or closed the generation; look again."""


_LOOKED_AT = ("n", "submissions", "closed")


class Generation(BaseModel):
    """The content of a task's file: its current generation of jobs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation: int = 0
    max_tries: int = 0  # Airflow's value when the generation began
    closed: bool = False
    former: str | None = None  # the last job of the previous generation
    former_over: bool = False  # whether the former job is known to be over
    n: int = 0  # the job's number in the generation
    submitted: bool = False  # whether Ray has confirmed it
    submissions: tuple[str, ...] = ()  # of all generations, oldest first; the last one counts
    offset: int = 0  # byte at which the last job's lines begin in the progress file
    best: dict[str, float] = {}  # how far earlier jobs of the generation came, by unit


@dataclass(frozen=True)
class JobState:
    """The state of one task instance, in its file; safe for several processes at once."""

    path: Path

    @classmethod
    def of(cls, workspace: Path, task_id: str, map_index: int) -> "JobState":
        """Return the state of a task instance; `map_index` is -1 for a task that is not mapped."""
        return cls(workspace / JOBS / f"{instance_name(task_id, map_index)}.json")

    def read(self) -> Generation:
        """Return the content of the file, or the first generation."""
        return read_model(self.path, Generation) if self.path.exists() else Generation()

    def begin(self, max_tries: int) -> Generation:
        """Return the generation to run; a Clear of a task that had jobs begins the next one."""
        with self._locked():
            known = self.read()
            if known.submissions and (known.closed or max_tries > known.max_tries):
                known = Generation(
                    generation=known.generation + 1,
                    former=known.submissions[-1],
                    submissions=known.submissions,
                )
            # A process from before the Clear may still be at work; it must not undo the new value.
            newest = max(max_tries, known.max_tries)
            return self._write(known.model_copy(update={"max_tries": newest}))

    def update(self, seen: Generation, **changes: object) -> Generation:
        """Change some fields of the file, of which the caller has seen a content.

        Raises:
            OutdatedError: A process of the cleared task has begun another generation.
            OvertakenError: The job that counts is not the one that the caller has seen.
        """
        with self._locked():
            known = self.read()
            if known.generation != seen.generation:
                raise OutdatedError("the task was cleared, and another process works on it now")
            if any(getattr(known, field) != getattr(seen, field) for field in _LOOKED_AT):
                raise OvertakenError("another process has changed which job counts")
            return self._write(known.model_copy(update=changes))

    def close(self, submission_id: str) -> None:
        """Never attach to this job again; has no effect once the next generation began."""
        if not self.path.exists():  # the workspace is gone
            return
        with self._locked():
            known = self.read()
            if known.submissions[-1:] == (submission_id,) and known.former != submission_id:
                self._write(known.model_copy(update={"closed": True}))

    def _locked(self) -> AbstractContextManager[None]:
        return one_at_a_time(self.path.with_suffix(".lock"))

    def _write(self, values: Generation) -> Generation:
        write_json(self.path, values.model_dump(mode="json"))
        return values


def instance_name(task_id: str, map_index: int) -> str:
    """Return a task instance's name within its workspace."""
    return task_id if map_index < 0 else f"{task_id}-{map_index}"
