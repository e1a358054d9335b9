"""What training does after the memory of a machine ran out: takes less, waits, and tries again.

By then all workers and Ray Train's controller have ended, so a wait in the driver holds no memory.
"""

import time
from pathlib import Path

from pipelines.recipe.recipe import Recipe
from pipelines.run.logbook import Entry, note
from pipelines.run.progress import add_note
from pipelines.stages.train.layout_file import LAYOUT, LayoutFile
from pipelines.stages.train.train_logbook import workers_of
from pipelines.training.preemption import PreemptedError
from ray_jobs import notice
from ray_jobs.train_overseer import STAGE, FruitlessError, Progress, shortage_of

PAUSES_S = (0.0, 15.0, 30.0, 60.0)  # before each next try in a row; the last one again and again
LONGEST_S = 600.0  # all pauses since the last new checkpoint


class MemoryShortage:
    """Says what the next try takes, and when it begins.

    Attributes:
        workers: The workers of the next try: n, or [least, most].
    """

    def __init__(self, recipe: Recipe, workspace: Path, *, on_gpus: bool) -> None:
        """Begin with what the recipe asks for.

        Args:
            recipe: Of the run.
            workspace: Of the run.
            on_gpus: Whether activations lie in the memory of GPUs, and not in the machine's.
        """
        self.workers = recipe.resources.workers
        self._workspace, self._on_gpus = workspace, on_gpus
        self._layout = LayoutFile(workspace, recipe)
        self._progress = Progress(recipe, workspace)
        self._tries, self._waited = 0, 0.0  # since the last new checkpoint

    def met(self, life: str, error: Exception) -> None:
        """Note the shortage, and return when the next try may begin.

        Args:
            life: Of the controller that ended with this shortage.
            error: What it ended with.

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
        done = f"the next try takes {self._less() or 'as much as this one'}"
        if pause:
            done += f", {pause:.0f} s later"
        key = f"{STAGE}: out of memory: {life}"
        entry = Entry(kind="out of memory", key=key, stage=STAGE, cause=cause, done=done)
        note(self._workspace, entry)
        self._wait(pause)

    def _less(self) -> str | None:
        """Take half of a micro-batch, or else a worker fewer, and say so; None: neither can be."""
        if not self._on_gpus and (most := self._layout.halve_micro_batch()):
            return f"micro-batches of {most}"
        if isinstance(self.workers, tuple) and (used := self._layout.read().get(LAYOUT)):
            least, had = self.workers[0], workers_of(used)
            if least < had:
                self.workers = (least, had - 1)
                return f"{had - 1} workers at most"
        return None

    def _wait(self, seconds: float) -> None:
        if seconds:
            add_note(self._workspace, STAGE, f"waits {seconds:.0f} s for memory")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if notice.asked(self._workspace):
                raise PreemptedError("the job's time ends; the run goes on from its checkpoint")
            time.sleep(min(1.0, seconds))
