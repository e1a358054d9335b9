"""Saves a checkpoint on SIGTERM, so that no work is lost when this process is taken away.

The signal only leaves a notice, which the training loop reads between two steps. All processes save
after the same step, and the run ends with `PreemptedError`, so that a user or a scheduler can start
it again. This module does not import torch because Ray Train's controller imports it, too.
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

# Ray stops a process that it no longer wants by SIGTERM, and by SIGKILL 0.1 s later. This SIGTERM
# does not count as a notice: a process that is stopped on purpose saves nothing.
_NOTICE_S = 0.5
EXIT_BY_SIGTERM = 128 + signal.SIGTERM  # exit code of a process that saved and may restart


class PreemptedError(Exception):
    """The run was asked to end; the next start goes on from its newest checkpoint."""


class Notice(NamedTuple):
    """Why a run is to end before its last step."""

    reason: str
    is_preemption: bool  # else the number of workers changes, which is logged when they resume
    since: float  # when it was given, on this process's monotonic clock


class _Process:
    """The notice that this process was given; signals reach a whole process, so this is global.

    Attributes:
        notice: None as long as the run may go on.
        saving: Whether a training loop looks for a notice.
        ended: Set while no training loop does.
    """

    notice: Notice | None = None
    saving = False
    ended = threading.Event()


def listen() -> None:
    """Take SIGTERM as a notice while a run trains; only the main thread may call this.

    Outside of training there is nothing to save, and the signal has its former effect.
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
    """Ask the run to save and end; if it was asked before, the first reason is kept."""
    if _Process.notice is None:
        _Process.notice = Notice(reason, is_preemption, time.monotonic())


def asked() -> Notice | None:
    """Return why this process wants the run to end, or None."""
    notice = _Process.notice
    too_new = notice is not None and time.monotonic() - notice.since < _NOTICE_S
    return None if too_new else notice


def save_and_end(reason: str, seconds: float) -> bool:
    """Ask from another thread, and return whether a run ended within that many seconds."""
    if not _Process.saving:
        return False
    ask(reason, is_preemption=False)
    return _Process.ended.wait(seconds)


@contextmanager
def listening() -> Iterator[None]:
    """Take notices within the block, where a loop must look at `asked` after every step."""
    _Process.notice, _Process.saving = None, True
    _Process.ended.clear()
    try:
        yield
    finally:
        _Process.saving = False
        _Process.ended.set()
