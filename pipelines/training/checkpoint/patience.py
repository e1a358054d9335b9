"""Lets a run go on, and save again, while a disk is full or a bucket is away for a limited time."""

import logging
import time
from pathlib import Path

from pipelines.core.errors import SharedError, UnreachableError, UserError
from pipelines.core.storage import may_pass, what_is_full
from pipelines.training.hooks import Events

RETRY_S = 15.0  # from a failed save to the next try
LONGEST_S = 600.0  # a run goes on without saves at least so long, ...
MISSED = 3  # ... and until so many checkpoints were missed

_log = logging.getLogger(__name__)


class UnsavedError(SharedError):
    """A checkpoint that could not be written, for a reason that may pass."""


class UnsavedInS3Error(UnsavedError, UnreachableError):
    """An UnsavedError for a bucket; a DAG task that fails with it is tried again."""


def unsaved(place: str, cause: BaseException) -> UserError:
    """Return the error that every process raises for a failed save."""
    line = f"{place}: the checkpoint can't be written: {what_is_full(cause, Path(place).parent)}"
    line += "; the run goes on from the one before it"
    if is_away(place, cause):
        return UnsavedInS3Error(line)
    if may_pass(cause):
        return UnsavedError(line)
    return SharedError(line)


def is_away(place: str, cause: BaseException) -> bool:
    """Return whether S3 is away for now; what S3 refuses, a user must fix."""
    a_persons = isinstance(cause, UserError | FileNotFoundError | PermissionError)
    return isinstance(cause, UnreachableError) or ("s3://" in place and not a_persons)


class Patience:
    """Counts for how long checkpoints were due but could not be saved."""

    def __init__(self, every: int, events: Events) -> None:
        """Begin without a failed save.

        Args:
            every: Steps between checkpoints.
            events: Is told once each time that saving begins to fail.
        """
        self._every = every
        self._events = events
        self._since: float | None = None  # when the first of the failed saves failed
        self._saved = 0  # step of the newest checkpoint
        self._retry_at = 0.0

    def saved(self, step: int) -> None:
        """Note that the checkpoint after `step` is complete."""
        if self._since is not None:
            failing = time.monotonic() - self._since
            _log.warning("the checkpoint after step %d is written, %.0f s late", step, failing)
        self._since, self._saved = None, step

    def failed(self, step: int, error: UnsavedError) -> None:
        """Note that a checkpoint could not be written; training goes on."""
        now = time.monotonic()
        _log.warning("%s", error)
        if self._since is None:
            self._since = now
            self._events.note(
                "storage",
                f"storage at step {step}",
                str(error).partition("; ")[0],
                f"training goes on and saves again every {RETRY_S:g} s",
                step=step,
            )
        self._retry_at = now + RETRY_S

    def is_spent(self, step: int, *, last: bool = False) -> bool:
        """Return whether saving failed for too long, by this process's clock.

        After the last step nothing is computed any more, so only the time counts.
        """
        if self._since is None:
            return False
        late = last or step - self._saved >= MISSED * self._every
        return late and time.monotonic() - self._since >= LONGEST_S

    @property
    def retry_is_due(self) -> bool:
        """Whether it is time to save again, by this process's clock."""
        return self._since is not None and time.monotonic() >= self._retry_at
