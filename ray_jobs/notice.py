"""SIGUSR1 to a job's own process: the time that it has here ends, but not the run.

Training saves, and the job ends with `PreemptedError` for whoever starts it anew. SIGTERM is Ray's
own word for a stop, which saves nothing.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

_asked = Event()


def asked() -> bool:
    """Return whether the run is to save and end."""
    return _asked.is_set()


@contextmanager
def listening_for_notice() -> Iterator[None]:
    """Within the block SIGUSR1 is a notice, and SIGTERM ends it; the main thread calls this.

    Ray's handler of SIGTERM ends the process three seconds later, and Slurm sends the signal twice:
    neither is to happen before MLflow knows. The code stays Ray's, as 143 means that it saved.
    """

    def noted(_: int, __: FrameType | None) -> None:
        _asked.set()

    def ended(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(number)

    before = signal.signal(signal.SIGUSR1, noted)
    rays = signal.signal(signal.SIGTERM, ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
        if signal.getsignal(signal.SIGTERM) is ended:
            signal.signal(signal.SIGTERM, rays)
        _asked.clear()
