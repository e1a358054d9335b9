"""What is looked at before anything starts: ports, memory, disk and the temporary folder."""

import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.settings import Settings

MEMORY_GIB = 6
DISK_GIB = 10
# Linux allows 107 bytes; Ray appends ray/session_<date>_<pid>/sockets/plasma_store to the folder.
_LONGEST_TEMP = 17


def check_ports(settings: Settings) -> None:
    """Raise UserError naming the first port that another process holds."""
    for variable, port in settings.ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                raise UserError(
                    f"port {port} is in use by another program; "
                    f"set {variable} to a free one and run `penstock up` again"
                ) from None


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Memory in total and free, of the machine or, where that is less, of this container."""
    import psutil  # type: ignore[import-untyped]

    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    try:
        limit, used, stat = (
            (cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current", "stat")
        )
    except OSError:  # no container, or one of cgroup v1
        return total, free
    if limit.isdecimal():  # else `max`
        # Files that nobody used lately count as used, and are given up first.
        kept = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)
        left = int(limit) - int(used) + int(kept[1] if kept else 0)
        total, free = min(total, int(limit)), min(free, max(0, left))
    return total, free


def resource_warnings(home: Path) -> list[str]:
    """One line for each resource that may not suffice."""
    memory = memory_bytes()[1] / 2**30
    disk = shutil.disk_usage(home).free / 2**30
    warnings = []
    if memory < MEMORY_GIB:
        warnings.append(
            f"only {memory:.1f} GiB of memory is free; under {MEMORY_GIB} GiB a run may be killed: "
            "close other programs"
        )
    if disk < DISK_GIB:
        warnings.append(
            f"only {disk:.1f} GiB of disk is free under {home}; under {DISK_GIB} GiB a run may "
            "fail: free some or set PENSTOCK_HOME to another disk"
        )
    return warnings


def make_runtime_folder() -> Path:
    """A short private folder that `down` removes: sockets, Ray's session and a link to .venv.

    Raises:
        UserError: the system's temporary folder is no place for Ray.
    """
    parent = tempfile.gettempdir()
    if len(parent.encode()) > _LONGEST_TEMP or " " in parent:
        raise UserError(
            f"the temporary folder {parent} has too long a path, or one with spaces, for Ray; "
            "set TMPDIR=/tmp and run `penstock up` again"
        )
    runtime = Path(tempfile.mkdtemp(prefix="penstock-", dir=parent))  # mode 0700
    (runtime / "venv").symlink_to(sys.prefix)
    return runtime
