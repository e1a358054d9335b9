"""What a command takes of the processor: other programs take their share of the clock."""

import os
import subprocess
import time
from functools import cache
from pathlib import Path

_LOOP = compile("for number in range(2_000_000): total += number", "a loop", "exec")
_LOOP_S = 0.12  # on the processor that the tests' limits were written on


def limit(seconds: float) -> float:
    """So many seconds on that processor, as seconds on this one where it is slower."""
    return seconds * max(1.0, _loop_seconds() / _LOOP_S)


@cache
def _loop_seconds() -> float:
    def once() -> float:
        before = time.process_time()
        exec(_LOOP, {"total": 0})
        return time.process_time() - before

    return min(once() for _ in range(3))


def seconds_of(*command: str | Path) -> float:
    """The least of three, once its modules are compiled."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def seconds() -> float:
        before = os.times()
        subprocess.run(command, check=True, capture_output=True, env=environment)
        after = os.times()
        used = after.children_user - before.children_user
        return used + after.children_system - before.children_system

    seconds()  # writes the bytecode
    return min(seconds() for _ in range(3))
