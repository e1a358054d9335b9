"""Runs code that a model wrote in a process that can do no harm.

The process has no network, can read only Python's own files and write nowhere, and ends at its
limits of processor time, time and memory, with all that it started; only root's may start any.
Linux keeps it so: namespaces, Landlock and resource limits. Where one is lacking, no code runs.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipelines.core.errors import UserError

_PYTHON = sys.executable, "-I", "-S", "-B", str(Path(__file__).with_name("sandboxed.py"))
_REFUSED = 97  # the exit status where the machine can't keep the process so


class Limits(NamedTuple):
    """Of one run."""

    cpu_seconds: int
    seconds: float
    memory_bytes: int


def passes(code: str, limits: Limits) -> bool:
    """Return whether Python code runs to its last line without an error within its limits.

    Raises:
        UserError: the machine can't run it without danger.
    """
    word = secrets.token_hex()
    with tempfile.TemporaryFile() as output:  # a file has a limit, where a pipe has none
        process = subprocess.Popen(
            [*_PYTHON, str(limits.cpu_seconds), str(limits.memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={},
            cwd="/",
            start_new_session=True,
        )
        try:
            process.communicate(f"{word}\n{code}".encode(), timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it may have started
            process.wait()
        output.seek(0)
        told = output.read()
    if process.returncode == _REFUSED:
        raise UserError(
            "reinforcement.rewards: this machine can't run a model's code without danger: "
            f"{told.decode(errors='replace').strip()}"
        )
    return process.returncode == 0 and told.endswith(word.encode())
