"""Copies of a run's checkpoints in further places, such as S3 beside a fast disk.

Rank 0 copies a checkpoint once it is complete, in a thread for each place, while training goes on.
A place gets one at a time; of those that become due meanwhile the newest is copied next.
"""

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

from pipelines.core.errors import UserError, one_line
from pipelines.recipe.recipe import Recipe
from pipelines.training.checkpoint.patience import LONGEST_S, RETRY_S
from pipelines.training.checkpoint.store import CheckpointStore, checkpoints_of, copies_of
from pipelines.training.hooks import Events

_LAST_COPY_S = 1800.0  # that a run, whose model is written, waits for a copy that gets on
_LOOK_S = 0.1  # between two looks whether it is done

_log = logging.getLogger(__name__)


class FurtherPlace:
    """A place to which a run's checkpoints are copied.

    Attributes:
        store: The copies.
        copying: The step of the checkpoint that is being copied, if any; it must be kept.
    """

    def __init__(
        self, url: str, source: CheckpointStore, every: int, keep: int, events: Events
    ) -> None:
        """Set up the copies; nothing is read or written yet.

        Args:
            url: A folder that all machines share, or s3://bucket/prefix; no other run uses it.
            source: The run's checkpoints, in a folder; `claim` was already called on it.
            every: The least number of steps between two checkpoints that are copied.
            keep: The number of newest copies to keep.
            events: Is told once each time that copies begin to fail.
        """
        self.store = CheckpointStore(url)
        self.copying: int | None = None
        self._source = source
        self._every = every
        self._keep = keep
        self._events = events
        self._newest: int | None = None  # the last step that was copied; None: not yet known
        self._fails = False
        self._lock = threading.Lock()
        self._wanted = self._works = False  # whether to look again, and whether the thread lives
        self._over = threading.Event()

    def newest(self) -> int:
        """Return the step of the newest copy, or 0; copies of another run are deleted first.

        Raises:
            UserError: The place has other files, or cannot be read; UnreachableError if it is away.
        """
        if self._newest is None:
            try:
                self.store.claim(self._source.identity())
                self._newest = max(self.store.steps(), default=0)
            except OSError as error:
                raise UserError(f"{self.store.place}: {one_line(error)}") from error
        return self._newest

    def look(self) -> None:
        """Have the newest checkpoint copied if that is due; nobody waits for it."""
        with self._lock:
            self._wanted = True
            if not self._works:
                threading.Thread(target=self._work, daemon=True).start()
                self._works = True

    def finish(self) -> None:
        """Wait for the copies that are due, at the end of a run, but not for ever."""
        began = time.monotonic()
        if self._works:
            _log.info("the run waits until its checkpoint is copied to %s", self.store.place)
        while self._works:
            waited = time.monotonic() - began
            if waited > (LONGEST_S if self._fails else _LAST_COPY_S):
                self._note(f"it was not done {waited:.0f} s after the end of the run", "given up")
                break
            time.sleep(_LOOK_S)
        self.close()

    def close(self) -> None:
        """Try no further copy; one that is under way is left behind and does not count."""
        self._over.set()

    def _work(self) -> None:
        while self._is_wanted():
            try:
                self._copy_newest()
                self._fails = False
            except Exception as error:  # the logbook has it, whatever it is, and training goes on
                self._failed(error)
            self.copying = None

    def _is_wanted(self) -> bool:
        with self._lock:
            self._works, self._wanted = self._wanted and not self._over.is_set(), False
            return self._works

    def _copy_newest(self) -> None:
        before = self.newest()
        step = max(self._source.steps(), default=0)
        if step < before + self._every:
            return
        self.copying = step
        self._source.copy(step, self.store)
        self._newest, self.copying = step, None
        _log.info("copied the checkpoint after step %d: %s", step, self.store.url(step))
        self.store.prune(self._keep, keep_best=False)

    def _failed(self, error: Exception) -> None:
        if self.copying is not None:
            with suppress(OSError, UserError):  # its room is needed; or the next copy removes it
                self.store.remove(self.copying)
        if self._fails:
            _log.warning("%s: %s", self.store.place, one_line(error))
        else:
            self._fails = True
            self._note(
                one_line(error), f"training goes on, and it is tried again every {RETRY_S:g} s"
            )
        self._wanted = True
        self._over.wait(RETRY_S)

    def _note(self, why: str, done: str) -> None:
        step, place = self.copying, self.store.place
        cause = f"{place}: no checkpoint can be copied there: {why}"
        _log.warning("%s; %s", cause, done)
        try:
            key = f"copies to {place} after step {self._newest or 0}: {done}"
            self._events.note("storage", key, cause, done, step=step)
        except Exception:
            _log.exception("the logbook can't be written")


def further_places(recipe: Recipe, workspace: Path, events: Events) -> list[FurtherPlace]:
    """Return the further places of a run's checkpoints, by its recipe."""
    source = CheckpointStore(checkpoints_of(recipe, workspace))
    return [
        FurtherPlace(url, source, more.every, more.keep, events)
        for url, more in zip(
            copies_of(recipe, workspace), recipe.train.more_checkpoints, strict=True
        )
    ]
