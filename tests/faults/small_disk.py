"""A small file system of its own, which can be filled to the last byte."""

import itertools
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, mebibytes: int, inodes: int = 0) -> Iterator[Path]:
    """Mounted at a folder while in the block; the test is skipped where that is not allowed.

    Args:
        place: The folder.
        mebibytes: The room for bytes.
        inodes: The room for files and folders; 0 is as much as there is memory.
    """
    place.mkdir(parents=True, exist_ok=True)
    mount = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={mebibytes}m,nr_inodes={inodes}",
        "tmpfs",
        str(place),
    ]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk can't be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Not a byte more goes onto a disk in the block."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(size))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def out_of_inodes(disk: Path) -> Iterator[None]:
    """Not one file more goes onto a disk in the block, though it has room for bytes."""
    ballast = disk / "ballast"
    ballast.mkdir()
    with pytest.raises(OSError, match="No space left"):
        for number in itertools.count():
            (ballast / str(number)).touch()
    try:
        yield
    finally:
        shutil.rmtree(ballast)
