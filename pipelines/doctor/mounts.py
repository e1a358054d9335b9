"""Which file system a folder is on, and how it is mounted: /proc/self/mountinfo."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipelines.core.settings import load_settings
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
    """Where the home lies."""
    home = existing(load_settings().home)
    return read(partial(mount_of, home), _TABLE.read_text(), str(_TABLE))


def existing(path: Path) -> Path:
    """The folder, or the nearest above it that there is."""
    return next(each for each in (path, *path.parents) if each.exists()).resolve()


def mount_of(path: Path, mountinfo: str) -> Mount:
    """The mount that a path is on: the last of those with the longest point, which hides others.

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
