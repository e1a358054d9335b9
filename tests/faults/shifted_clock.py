"""A clock of their own for some processes, which can be set while they run: libfaketime."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipelines.core.storage import write_text

_LIBRARY = "faketime/libfaketimeMT.so.1"  # of Debian's package libfaketime
# Of a monotonic sleep that is over as it begins, libfaketime 0.9.10 makes an error; the kernel does
# it right, as nothing of that clock is shifted.
_SLEEP = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *for_, struct timespec *left)
{ return syscall(SYS_clock_nanosleep, clock, flags, for_, left) ? errno : 0; }
"""


class ShiftedClock:
    """The clock of all processes that have its variables in their environment.

    Files keep the machine's own times, as those that were written before a shift do.
    """

    def __init__(self, *libraries: Path, file: Path) -> None:
        self._file = file
        self.shift("+0")
        self.variables = {
            "LD_PRELOAD": ":".join(map(str, libraries)),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_CACHE_DURATION": "1",  # seconds until each process sees a shift
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # setting a clock does not touch that one
            "NO_FAKE_STAT": "1",
        }

    def shift(self, by: str) -> None:
        """Set it against the machine's: `-1h`, `+1d`, or `+0` for none."""
        write_text(self._file, f"{by}\n")


@contextmanager
def shifted_clock() -> Iterator[ShiftedClock]:
    """A clock to be set; the test is skipped where the library is not installed."""
    found = next(Path("/usr/lib").glob(f"*/{_LIBRARY}"), None)
    if found is None:
        pytest.skip("no clock can be set here: `apt-get install libfaketime` has the library")
    with tempfile.TemporaryDirectory() as folder:
        sleep = Path(folder) / "sleep.so"
        compiler = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(sleep)]
        subprocess.run(compiler, input=_SLEEP, text=True, check=True)
        yield ShiftedClock(sleep, found, file=Path(folder) / "shift")
