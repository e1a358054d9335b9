"""What this machine has to give: a free port, and memory."""

import re
import socket
from pathlib import Path


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
