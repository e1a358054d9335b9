"""A memory of a few GiB for some processes, as a container has; Ray takes it for the machine's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.faults.pipeline_run import until

_GROUPS = Path("/sys/fs/cgroup")
# The mount is seen by the command and what it starts only.
_ENTER = 'echo $$ >"$0/cgroup.procs" && mount --bind "$0" "$1" && shift && exec "$@"'


@contextmanager
def small_memory(size: int) -> Iterator[list[str]]:
    """What begins a command that shares it; the test is skipped where it can't be made."""
    first = (_GROUPS / "memory").is_dir()  # cgroup v1
    parent = _GROUPS / "memory" if first else _GROUPS
    group = parent / f"penstock-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(size))
    except OSError as error:
        pytest.skip(f"no group of processes can have its own memory here: {error}")
    try:
        yield ["unshare", "--mount", "sh", "-c", _ENTER, str(group), str(parent)]
    finally:
        until(lambda: _removed(group), "the end of all processes in the group", 60)


def _removed(group: Path) -> bool:
    with suppress(OSError):  # a process is in it
        group.rmdir()
    return not group.exists()
