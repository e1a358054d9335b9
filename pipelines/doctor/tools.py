"""The tools and files of a machine, as its administrator would look at them.

PCI devices as the kernel lists them, with or without a driver.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from pipelines.core.errors import UserError
from pipelines.doctor.findings import FaultError, NoAnswerError, NotHereError, ToolFailedError

_SECONDS = "PENSTOCK_DOCTOR_SECONDS"
_DEFAULT_S = 8.0
# Where nothing keeps the driver loaded, nvidia-smi loads it first; NCCL takes seconds for 8 GPUs.
_WITH_GPUS_S = 60.0
_DRIVER = Path("/proc/driver/nvidia")
_IN_CONTAINER = (Path("/.dockerenv"), Path("/run/.containerenv"))
_PODS = "KUBERNETES_SERVICE_HOST"
_GRACE_S = 0.2
_SHOWN, _MOST_WORDS = 60, 300  # characters of what can't be read, and of what failed

T = TypeVar("T")


def limit_s() -> float:
    """Return seconds that the checks of a machine may take together.

    Raises:
        UserError: PENSTOCK_DOCTOR_SECONDS is no number of them.
    """
    usual = _WITH_GPUS_S if _DRIVER.exists() else _DEFAULT_S
    text = os.environ.get(_SECONDS) or str(usual)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{_SECONDS}={text!r}: not a number of seconds above 0")
    return seconds


def once(work: Callable[[], T]) -> Callable[[], T]:
    """Return what several checks ask for is done once a process; a failure, too, is told to all."""
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
    """Return what a tool prints, in English.

    Args:
        command: The tool and its arguments.
        folders: Where it may lie beside PATH.

    Raises:
        NotHereError: it is not installed.
        ToolFailedError: it failed.
        NoAnswerError: it hangs.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])
    tool = shutil.which(command[0], path=path)
    if tool is None:
        raise NotHereError(f"{command[0]} is not installed")
    called, limit = " ".join(command), 0.9 * limit_s()  # so that the check can still tell it
    try:
        done = run_in_time([tool, *command[1:]], limit, env={**os.environ, "LC_ALL": "C"})
    except subprocess.TimeoutExpired:
        fix = f"run `{called}` by hand; a driver or daemon that hangs often needs a restart"
        raise NoAnswerError(f"`{called}` gave no answer in {limit:.1f} s", fix) from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())[:_MOST_WORDS]
        words = words or f"exit code {done.returncode}"
        fix = f"run `{called}` by hand until it succeeds"
        raise ToolFailedError(f"`{called}`: {words}", fix, done.stdout)
    return done.stdout


def run_in_time(
    command: Sequence[str], limit: float, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Return what a process printed; it and its children are killed when it takes too long.

    Raises:
        subprocess.TimeoutExpired: it took longer than `limit` seconds.
    """
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its children end with it
        **options,
    )
    try:
        output, errors = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_GRACE_S)  # one that the kernel holds does not end
        raise
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def read(parse: Callable[[str], T], text: str, source: str) -> T:
    """Return what a parser makes of the text of a tool or file; parsers raise ValueError, and no
    other.

    Raises:
        FaultError: it is not as any version known here has it.
    """
    try:
        return parse(text)
    except ValueError as error:
        shown = " ".join(text.split())[:_SHOWN] or "nothing"
        saw = f"{source} could not be read: {error}; it says: {shown}"
        fix = f"see {source} by hand; where it is whole, please report it"
        raise FaultError(saw, fix) from None


def in_container() -> bool:
    """Return whether this is a container, whose driver and devices are the host's."""
    return _PODS in os.environ or any(path.exists() for path in _IN_CONTAINER)


def installed(package: str) -> str | None:
    """Return the version of a Python package; None where it is not here."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def text_of(path: Path) -> str | None:
    """Return a file of the kernel without its last newline; None if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # gone, forbidden, or a driver that gives no value
        return None


_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_OTHER_BRIDGE = "0x0680"
_DISPLAY = "0x03"  # VGA and 3D controllers


def nvidia_devices(root: Path = _DEVICES) -> list[str]:
    """Return the addresses of NVIDIA's GPUs."""
    return sorted(
        device.name
        for device in root.glob("*")
        if text_of(device / "vendor") == _NVIDIA
        and (text_of(device / "class") or "").startswith(_DISPLAY)
    )


def has_nvswitch(root: Path = _DEVICES) -> bool:
    """Return whether a bridge of NVIDIA's is here that the host sees: of Ampere's and Hopper's
    boards.
    """
    return any(
        text_of(device / "vendor") == _NVIDIA
        and (text_of(device / "class") or "").startswith(_OTHER_BRIDGE)
        for device in root.glob("*")
    )


def kernel_driver(address: str, root: Path = _DEVICES) -> str | None:
    """Return the kernel's driver of a device: `nvidia`, `nouveau`, `vfio-pci`; None without one."""
    driver = root / address / "driver"
    return driver.resolve().name if driver.is_symlink() else None
