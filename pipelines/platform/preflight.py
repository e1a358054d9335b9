"""Checks before the platform starts: ports, memory, disk and the temporary folder."""

import shutil
import socket
import sys
import tempfile
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.machine import memory_bytes
from pipelines.core.settings import Settings

MEMORY_GIB = 6
DISK_GIB = 10
# Linux allows 107 bytes; Ray appends ray/session_<date>_<pid>/sockets/plasma_store to the folder.
_LONGEST_TEMP = 17


def check_ports(settings: Settings) -> None:
    """Raise UserError with the first port that another process uses."""
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


def resource_warnings(home: Path) -> list[str]:
    """Return one warning for each resource that may be too small."""
    memory = memory_bytes()[1] / 2**30
    disk = shutil.disk_usage(home).free / 2**30
    warnings = []
    if memory < MEMORY_GIB:
        warnings.append(
            f"only {memory:.1f} GiB of memory is free; below {MEMORY_GIB} GiB a run may be killed: "
            "close other programs"
        )
    if disk < DISK_GIB:
        warnings.append(
            f"only {disk:.1f} GiB of disk is free in {home}; below {DISK_GIB} GiB a run may "
            "fail: free some space or set PENSTOCK_HOME to another disk"
        )
    return warnings


def make_runtime_folder() -> Path:
    """Create the private folder for sockets, Ray's session and a link to .venv; `down` removes it.

    Raises:
        UserError: Ray cannot use the path of the system's temporary folder.
    """
    parent = tempfile.gettempdir()
    if len(parent.encode()) > _LONGEST_TEMP or " " in parent:
        raise UserError(
            f"the path of the temporary folder {parent} is too long for Ray or has spaces; "
            "set TMPDIR=/tmp and run `penstock up` again"
        )
    runtime = Path(tempfile.mkdtemp(prefix="penstock-", dir=parent))  # mode 0700
    (runtime / "venv").symlink_to(sys.prefix)
    return runtime
