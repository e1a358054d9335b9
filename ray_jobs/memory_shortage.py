"""What training does after the memory of a machine ran out: takes less, waits, and tries again.

By then all workers have ended, so a wait in the driver holds no memory.
"""

import time
from pathlib import Path

from pipelines.recipe.recipe import Recipe
from pipelines.run.logbook import Entry, note
from pipelines.run.progress import add_note
from pipelines.stages.train.layout_file import LayoutFile
from pipelines.training.preemption import PreemptedError
from ray_jobs import notice
from ray_jobs.train_overseer import STAGE, FruitlessError, Progress, shortage_of

PAUSES_S = (0.0, 15.0, 30.0, 60.0)  # before each next try in a row; the last one again and again
LONGEST_S = 600.0  # all pauses since the last new checkpoint


class MemoryShortage:
    """Says what the next try takes, and when it begins."""

    def __init__(self, recipe: Recipe, workspace: Path, *, on_gpus: bool) -> None:
        """Begin without one; on GPUs a micro-batch takes none of the machine's memory."""
        self._workspace, self._on_gpus = workspace, on_gpus
        self._layout = LayoutFile(workspace, recipe)
        self._progress = Progress(recipe, workspace)
        self._tries, self._waited = 0, 0.0  # since the last new checkpoint

    def met(self, life: str, error: Exception) -> None:
        """Note the shortage that ended a try; return when the next try may begin.

        Raises:
            FruitlessError: the memory stays short for too long.
            PreemptedError: the job was asked to end.
        """
        cause = shortage_of(error)
        if self._progress.got_on():
            self._tries, self._waited = 0, 0.0
        pause = PAUSES_S[min(self._tries, len(PAUSES_S) - 1)]
        self._tries, self._waited = self._tries + 1, self._waited + pause
        if self._waited > LONGEST_S:
            raise FruitlessError(
                f"out of memory {self._tries} times without a new checkpoint, {LONGEST_S:.0f} s of "
                f"waiting included; free memory on the machine; the last: {cause}"
            )
        most = None if self._on_gpus else self._layout.halve_micro_batch()
        takes = f"micro-batches of {most}" if most else "as much as this one"
        later = f", {pause:.0f} s later" if pause else ""
        key, done = f"{STAGE}: out of memory: {life}", f"the next try takes {takes}{later}"
        entry = Entry(kind="out of memory", key=key, stage=STAGE, cause=cause, done=done)
        note(self._workspace, entry)
        self._wait(pause)

    def _wait(self, seconds: float) -> None:
        if seconds:
            add_note(self._workspace, STAGE, f"waits {seconds:.0f} s for memory")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if notice.asked():
                raise PreemptedError("the job's time ends; the run goes on from its checkpoint")
            time.sleep(min(1.0, seconds))
