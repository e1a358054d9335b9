"""The tools and files of a machine, as its administrator would look at them."""

import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from pipelines.core.errors import UserError
from pipelines.doctor.findings import FaultError, NoAnswerError, NotHereError

_SECONDS = "PENSTOCK_DOCTOR_SECONDS"
_DEFAULT_S = 8.0  # nvidia-smi loads the driver first where nothing keeps it loaded


T = TypeVar("T")


def limit_s() -> float:
    """Seconds that the checks of a machine may take together.

    Raises:
        UserError: PENSTOCK_DOCTOR_SECONDS is no number of them.
    """
    text = os.environ.get(_SECONDS) or str(_DEFAULT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{_SECONDS}={text!r}: not a number of seconds above 0")
    return seconds


def once(work: Callable[[], T]) -> Callable[[], T]:
    """What several checks ask for is done once a process; a failure, too, is told to all."""
    outcome: Future[T] = Future()
    lock = threading.Lock()

    @functools.wraps(work)
    def asked() -> T:
        with lock:
            if not outcome.done():
                try:
                    outcome.set_result(work())
                except Exception as error:  # the one who asks gets it
                    outcome.set_exception(error)
        return outcome.result()

    return asked


def output_of(*command: str, folders: tuple[str, ...] = ()) -> str:
    """What a tool prints, in English.

    Args:
        command: The tool and its arguments.
        folders: Where it may lie beside PATH.

    Raises:
        NotHereError: it is not installed.
        FaultError: it failed, or hangs.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])
    tool = shutil.which(command[0], path=path)
    if tool is None:
        raise NotHereError(f"{command[0]} is not installed")
    called, limit = " ".join(command), 0.9 * limit_s()  # so that the check can still tell it
    try:
        done = subprocess.run(
            [tool, *command[1:]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        mend = f"run `{called}` by hand; a driver or daemon that hangs often needs a restart"
        raise NoAnswerError(f"`{called}` gave no answer in {limit:.1f} s", mend) from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise FaultError(f"`{called}`: {words}", f"run `{called}` by hand until it succeeds")
    return done.stdout


def installed(package: str) -> str | None:
    """The version of a Python package; None where it is not here."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def text_of(path: Path) -> str | None:
    """A file of the kernel's, without the newline at its end; None where it is not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # gone, forbidden, or a driver that gives no value
        return None
