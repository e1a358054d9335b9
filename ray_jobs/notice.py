"""SIGUSR1 to a job's own process: the time that it has here ends, but not the run.

Training saves, and the job ends with `PreemptedError` for whoever starts it anew. SIGTERM is Ray's
own word for a stop, which leaves three seconds and saves nothing.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_FILE = "end-asked"  # Ray Train's controller, which reads it, is on the node of the job's process


def asked(workspace: Path) -> bool:
    """Return whether the run is to save and end."""
    return (workspace / _FILE).exists()


@contextmanager
def listening_for_notice(workspace: Path) -> Iterator[None]:
    """Within the block the signal is a notice; the main thread calls it."""
    file = workspace / _FILE
    file.unlink(missing_ok=True)

    def noted(_: int, __: FrameType | None) -> None:
        file.touch()

    before = signal.signal(signal.SIGUSR1, noted)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
        file.unlink(missing_ok=True)
