"""SIGTERM: this process will be taken away, and the work since the last checkpoint must not be.

The signal only leaves a note; the training loop reads it between two steps, all processes save
after the same one, and the run ends with `PreemptedError` for whoever starts it anew. No torch
here: Ray Train's controller imports it, too.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Ray ends a process that it no longer wants by SIGTERM, and 0.1 s later by SIGKILL. That is no
# notice: what is stopped on purpose saves nothing.
_NOTICE_S = 0.5


class PreemptedError(Exception):
    """The run was asked to end; it goes on from its newest checkpoint."""


class _Notice:
    """What this process was told; signals are the whole process's, and so is this.

    Attributes:
        reason: Why the run is to end; None as long as it is not.
        since: When that was known first.
        saving: Whether a training loop looks at it.
    """

    reason: str | None = None
    since = 0.0
    saving = False
    ended = threading.Event()


def listen() -> None:
    """Take SIGTERM as a notice while a run trains; the main thread calls it.

    Outside of training there is nothing to save, and the signal does what it did before.
    """
    before = signal.getsignal(signal.SIGTERM)

    def noted(number: int, _: FrameType | None) -> None:
        if _Notice.saving:
            ask(f"SIGTERM to process {os.getpid()} on {socket.gethostname()}")
        else:
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, noted)


def ask(reason: str) -> None:
    """Let the run save and end; asked again, the first reason stands."""
    if _Notice.reason is None:
        _Notice.reason, _Notice.since = reason, time.monotonic()


def asked() -> str | None:
    """Why this process wants the run to end, or None."""
    too_new = time.monotonic() - _Notice.since < _NOTICE_S
    return None if too_new else _Notice.reason


def save_and_end(reason: str, seconds: float) -> bool:
    """From another thread: ask, and wait so long for the end; False where nothing trains."""
    if not _Notice.saving:
        return False
    ask(reason)
    return _Notice.ended.wait(seconds)


@contextmanager
def heeded() -> Iterator[None]:
    """Within the block somebody looks at `asked` after every step."""
    _Notice.reason, _Notice.saving = None, True
    _Notice.ended.clear()
    try:
        yield
    finally:
        _Notice.saving = False
        _Notice.ended.set()
