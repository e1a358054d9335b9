"""What one process may have of this machine: files, pinned and shared memory, memory and disk.

Which file system a folder is on, and how it is mounted: /proc/self/mountinfo.
"""

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipelines.core.settings import load_settings
from pipelines.doctor.findings import Seen, ok, problem, warning
from pipelines.doctor.network import DEVICES as RDMA_DEVICES
from pipelines.doctor.tools import read

_TABLE = Path("/proc/self/mountinfo")
NETWORK = {"nfs", "nfs4", "lustre", "beegfs", "wekafs", "gpfs", "ceph", "cifs", "fuse.s3fs"}


@dataclass(frozen=True)
class Mount:
    """A file system in its place; `options` are the mount's and the file system's own."""

    point: str
    kind: str
    source: str
    options: dict[str, str]


def data_mount() -> Mount:
    """Return where the home lies."""
    home = existing(load_settings().home)
    return read(partial(mount_of, home), _TABLE.read_text(), str(_TABLE))


def existing(path: Path) -> Path:
    """Return the folder, or the nearest above it that there is."""
    return next(each for each in (path, *path.parents) if each.exists()).resolve()


def mount_of(path: Path, mountinfo: str) -> Mount:
    """Return the mount that a path is on: the last of those with the longest point, which hides
    others.

    Raises:
        ValueError: no mount is above it, as in some chroots, or a line is not as it should be.
    """
    mounts = [_parse(line) for line in mountinfo.splitlines()]
    over = [mount for mount in mounts if path.is_relative_to(mount.point)]
    if not over:
        raise ValueError(f"no mount above {path} in it")
    longest = max(len(Path(mount.point).parts) for mount in over)
    return [mount for mount in over if len(Path(mount.point).parts) == longest][-1]


def _parse(line: str) -> Mount:
    """As proc_pid_mountinfo(5) has it; a space in a path is written as octal 040, and so on."""
    before, _, after = line.partition(" - ")
    fields = before.split()
    if len(fields) < 6 or after.count(" ") < 2:
        raise ValueError(f"a line that is no mount: {line[:40]!r}")
    point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
    kind, source, of_all = after.split(" ", 2)
    pairs = (option.partition("=") for option in f"{fields[5]},{of_all}".split(","))
    return Mount(point, kind, source, {key: value for key, _, value in pairs})


# Ray itself warns below 4096, and names 8192 (ray/_private/worker.py).
_LEAST_FILES, _ENOUGH_FILES = 4096, 8192
_GIB = 1 << 30
# What a container has where nobody asks for more: too little for one of NCCL's buffers.
_CONTAINER_SHM = 64 << 20
# Ray's object store is 30% of the memory, and lies there (ray/_private/ray_constants.py).
_OBJECT_STORE = 0.3
_IPC_LOCK = 14  # capabilities(7)
_STATUS = Path("/proc/self/status")
UNLIMITED = resource.RLIM_INFINITY


def files() -> Iterator[Seen]:
    """Open files."""
    yield assess_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def assess_open_files(soft: int, hard: int) -> Seen:
    """Ray raises the soft limit to the hard one, so that this one decides."""
    saw = f"{_limit(soft)} open files, which Ray raises to {_limit(hard)}"
    fix = f"ulimit -n {_ENOUGH_FILES}, or nofile in /etc/security/limits.conf or the unit's file"
    most = hard if hard != UNLIMITED else _ENOUGH_FILES
    if most < _LEAST_FILES:
        return problem(saw, fix)
    return warning(saw, fix) if most < _ENOUGH_FILES else ok(saw)


def pinned_memory() -> Iterator[Seen]:
    """Yield memory that may be locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = (*RDMA_DEVICES.glob("*"), *Path("/dev").glob("nvidia-fs*"))
    needed = sorted(path.name for path in found)
    yield assess_pinned_memory(soft, may_lock(_STATUS.read_text()), needed)


def assess_pinned_memory(limit: int, ipc_lock: bool, devices: list[str]) -> Seen:
    """RDMA and GPUDirect Storage register memory, which counts as locked; CUDA's own does not."""
    right = "has IPC_LOCK" if ipc_lock else "has no IPC_LOCK"
    saw = f"memlock is {_limit(limit, bytes_=True)}, the process {right}"
    if ipc_lock or limit == UNLIMITED:
        return ok(saw)
    if not devices:
        return ok(f"{saw}; no device here registers memory")
    return problem(
        saw, "ulimit -l unlimited; in a container the capability IPC_LOCK and memlock=-1"
    )


def may_lock_all() -> bool:
    """Return whether this process may lock memory without limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return soft == UNLIMITED or may_lock(_STATUS.read_text())


def may_lock(status: str) -> bool:
    """Return whether /proc/self/status shows the capability IPC_LOCK in effect."""
    mask = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", status, re.MULTILINE)
    return bool(int(mask[1], 16) >> _IPC_LOCK & 1) if mask else False


def shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Seen]:  # noqa: S108 (only looked at)
    """Yield the file system of shared memory."""
    from pipelines.core.machine import memory_bytes

    total, _ = memory_bytes()
    yield assess_shared_memory(os.statvfs(path).f_frsize * os.statvfs(path).f_blocks, total)


def assess_shared_memory(size: int, memory: int) -> Seen:
    """NCCL, Ray's object store and the loader's workers pass data through it."""
    saw = f"shared memory is {size / _GIB:.3g} GiB, of {memory / _GIB:.3g} GiB of memory"
    fix = "--shm-size in Docker, an emptyDir of medium Memory at /dev/shm in Kubernetes"
    if size <= _CONTAINER_SHM:
        return problem(saw, fix)
    if size < _OBJECT_STORE * memory:
        share = f"{_OBJECT_STORE:.0%} of the memory"
        return warning(f"{saw}: under {share}, so that Ray's object store goes to the disk", fix)
    return ok(saw)


def memory() -> Iterator[Seen]:
    """Yield memory and disk, by the rule of `penstock up`."""
    from pipelines.core.machine import memory_bytes
    from pipelines.core.settings import load_settings
    from pipelines.platform.preflight import resource_warnings

    place = existing(load_settings().home)
    lines = resource_warnings(place)
    for line in lines:
        saw, _, fix = line.rpartition(": ")
        yield warning(saw, fix)
    if not lines:
        _, free = memory_bytes()
        yield ok(f"{free / _GIB:.1f} GiB of memory and enough of the disk under {place} are free")


def _limit(value: int, *, bytes_: bool = False) -> str:
    if value == UNLIMITED:
        return "unlimited"
    return f"{value / (1 << 20):.3g} MiB" if bytes_ else f"{value:,}"
