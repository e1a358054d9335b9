"""What this machine has available, free ports and memory, and what it ran out of."""

import ctypes
import re
import socket
from pathlib import Path


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def has_cuda_driver() -> bool:
    """Return whether NVIDIA's driver is here, without which torch finds no CUDA device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return total and free bytes of memory, of the machine or of this container if it has less."""
    import psutil  # type: ignore[import-untyped]

    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    try:
        limit, used, stat = (
            (cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current", "stat")
        )
    except OSError:  # no container, or a container under cgroup v1
        return total, free
    if limit.isdecimal():  # otherwise it is `max`
        # Cached files that were not used lately count as used memory, but are freed first.
        kept = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)
        left = int(limit) - int(used) + int(kept[1] if kept else 0)
        total, free = min(total, int(limit)), min(free, max(0, left))
    return total, free


def oom_kills(
    container: Path = Path("/sys/fs/cgroup/memory.events"), machine: Path = Path("/proc/vmstat")
) -> int:
    """Return how many processes the kernel has ended for want of memory, so that more show later.

    Of this container, where cgroup v2 counts its own, and else of the machine.
    """
    counts = next((path.read_text() for path in (container, machine) if path.is_file()), "")
    found = re.search(r"^oom_kill (\d+)$", counts, re.MULTILINE)
    return int(found[1]) if found else 0
