"""A full disk or a bucket that is away ends no run: it saves again, until that lasts too long."""

import logging
import time

from pipelines.core.errors import SharedError, UnreachableError, UserError
from pipelines.core.storage import may_pass
from pipelines.training.events import Events

RETRY_S = 15.0  # from a save that failed to the next try
LONGEST_S = 600.0  # that a run goes on so, at the least ...
MISSED = 3  # ... and so many checkpoints that were due

_log = logging.getLogger(__name__)


class UnsavedError(SharedError):
    """A checkpoint that could not be written, for a reason that may pass."""


class UnsavedInS3Error(UnsavedError, UnreachableError):
    """Likewise, to a bucket; a DAG task that fails with it is tried again."""


def unsaved(place: str, cause: BaseException) -> UserError:
    """A save that failed, as the error that every process raises."""
    line = f"{place}: the checkpoint can't be written: {in_one_line(cause)}"
    line += "; the run goes on from the one before it"
    if is_away(place, cause):
        return UnsavedInS3Error(line)
    if may_pass(cause):
        return UnsavedError(line)
    return SharedError(line)


def is_away(place: str, cause: BaseException) -> bool:
    """Whether S3 is what failed: what it refuses a user fixes, any other trouble may pass."""
    a_persons = isinstance(cause, UserError | FileNotFoundError | PermissionError)
    return isinstance(cause, UnreachableError) or ("s3://" in place and not a_persons)


def in_one_line(cause: BaseException) -> str:
    """What it says of itself."""
    return " ".join((str(cause) or repr(cause)).split())


class Patience:
    """Counts how long there was no new checkpoint though there should have been."""

    def __init__(self, every: int, events: Events) -> None:
        """All is well.

        Args:
            every: Steps between checkpoints.
            events: Told once of each time that saving begins to fail.
        """
        self._every = every
        self._events = events
        self._since: float | None = None  # when a save failed first
        self._saved = 0  # step of the newest checkpoint
        self._retry_at = 0.0

    def saved(self, step: int) -> None:
        """A checkpoint is whole."""
        if self._since is not None:
            failing = time.monotonic() - self._since
            _log.warning("the checkpoint after step %d is written, %.0f s late", step, failing)
        self._since, self._saved = None, step

    def failed(self, step: int, error: UnsavedError) -> None:
        """A checkpoint is not; training goes on."""
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

    def is_spent(self, step: int) -> bool:
        """Whether it failed for too long, by this process's clock."""
        if self._since is None:
            return False
        late = step - self._saved >= MISSED * self._every
        return late and time.monotonic() - self._since >= LONGEST_S

    @property
    def retry_is_due(self) -> bool:
        """Whether it is time to save again, by this process's clock."""
        return self._since is not None and time.monotonic() >= self._retry_at
