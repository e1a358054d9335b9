"""Which file system a folder is on, and how it is mounted: /proc/self/mountinfo."""

from dataclasses import dataclass
from pathlib import Path

from pipelines.core.settings import load_settings

NETWORK = {"nfs", "nfs4", "lustre", "beegfs", "wekafs", "gpfs", "ceph", "cifs", "fuse.s3fs"}


@dataclass(frozen=True)
class Mount:
    """A file system in its place; `options` are the mount's and the file system's own."""

    point: str
    kind: str
    source: str
    options: dict[str, str]


def data_mount() -> Mount:
    """Where the home lies."""
    return mount_of(existing(load_settings().home), Path("/proc/self/mountinfo").read_text())


def existing(path: Path) -> Path:
    """The folder, or the nearest above it that there is."""
    return next(each for each in (path, *path.parents) if each.exists()).resolve()


def mount_of(path: Path, mountinfo: str) -> Mount:
    """The mount that a path is on: the last of those with the longest point, which hides others."""
    mounts = [_parse(line) for line in mountinfo.splitlines()]
    over = [mount for mount in mounts if path.is_relative_to(mount.point)]
    longest = max(len(Path(mount.point).parts) for mount in over)
    return [mount for mount in over if len(Path(mount.point).parts) == longest][-1]


def _parse(line: str) -> Mount:
    """As proc_pid_mountinfo(5) has it; a space in a path is written as octal 040."""
    before, _, after = line.partition(" - ")
    point, own = before.split()[4:6]
    kind, source, of_all = after.split(" ", 2)
    pairs = (option.partition("=") for option in f"{own},{of_all}".split(","))
    return Mount(point.replace("\\040", " "), kind, source, {key: value for key, _, value in pairs})
