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
from typing import NamedTuple

# Ray ends a process that it no longer wants by SIGTERM, and 0.1 s later by SIGKILL. That is no
# notice: what is stopped on purpose saves nothing.
_NOTICE_S = 0.5
EXIT_BY_SIGTERM = 128 + signal.SIGTERM  # of a process that saved and may be started anew


class PreemptedError(Exception):
    """The run was asked to end; it goes on from its newest checkpoint."""


class Notice(NamedTuple):
    """Why a run is to end before its last step."""

    reason: str
    is_preemption: bool  # and not a change of the workers' number, which is noted as they resume
    since: float  # when it was given, by this process's monotonic clock


class _Process:
    """What this process was told; signals are the whole process's, and so is this.

    Attributes:
        notice: None as long as the run may go on.
        saving: Whether a training loop looks at it.
        ended: Set while none does.
    """

    notice: Notice | None = None
    saving = False
    ended = threading.Event()


def listen() -> None:
    """Take SIGTERM as a notice while a run trains; the main thread calls it.

    Outside of training there is nothing to save, and the signal does what it did before.
    """
    before = signal.getsignal(signal.SIGTERM)

    def noted(number: int, _: FrameType | None) -> None:
        if _Process.saving:
            ask(f"SIGTERM to process {os.getpid()} on {socket.gethostname()}")
        else:
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, noted)


def ask(reason: str, *, is_preemption: bool = True) -> None:
    """Let the run save and end; asked again, the first reason stands."""
    if _Process.notice is None:
        _Process.notice = Notice(reason, is_preemption, time.monotonic())


def asked() -> Notice | None:
    """Why this process wants the run to end, or None."""
    notice = _Process.notice
    too_new = notice is not None and time.monotonic() - notice.since < _NOTICE_S
    return None if too_new else notice


def save_and_end(reason: str, seconds: float) -> bool:
    """Ask from another thread, and wait so long for the end; False where nothing trains."""
    if not _Process.saving:
        return False
    ask(reason, is_preemption=False)
    return _Process.ended.wait(seconds)


@contextmanager
def listening() -> Iterator[None]:
    """Within the block somebody looks at `asked` after every step."""
    _Process.notice, _Process.saving = None, True
    _Process.ended.clear()
    try:
        yield
    finally:
        _Process.saving = False
        _Process.ended.set()
