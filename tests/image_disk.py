"""A disk of its own: ext4 in a file; it can lose its power, and be as slow as a bad one."""

import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

# EXT4_IOC_SHUTDOWN of <linux/fs.h>: from now on nothing is written, not even the journal.
_SHUTDOWN, _WITHOUT_JOURNAL = 0x8004587D, 2
_BLKIO = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")  # of all, for one device


class ImageDisk:
    """An ext4 of so many MiB, mounted at `place`."""

    def __init__(self, image: Path, place: Path, mebibytes: int) -> None:
        self._image, self.place = image, place
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("there is no mkfs.ext4 here")
        place.mkdir()
        with image.open("wb") as file:
            file.truncate(mebibytes << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)

    def mount(self) -> None:
        """Make its files visible; the test is skipped where that is not allowed."""
        command = ["mount", "-o", "loop", str(self._image), str(self.place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no disk can be mounted from a file here: {done.stderr.strip()}")

    def unmount(self) -> None:
        """Take it away as soon as the processes that were killed have let it go."""
        for _ in range(100):
            with suppress(subprocess.CalledProcessError):
                subprocess.run(["umount", str(self.place)], check=True, capture_output=True)
                return
            time.sleep(0.1)
        raise AssertionError(f"{self.place} is still in use")

    def lose_power(self) -> None:
        """What is not on the disk now never comes there."""
        folder = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, _SHUTDOWN, struct.pack("I", _WITHOUT_JOURNAL))
        finally:
            os.close(folder)

    def power_up(self) -> None:
        """Unmounted, checked as at a start of a machine, and mounted."""
        self.unmount()
        check = ["fsck.ext4", "-p", str(self._image)]
        done = subprocess.run(check, capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stdout  # 1: it mended something
        self.mount()

    @contextmanager
    def slow(self, bytes_a_second: int) -> Iterator[None]:
        """No more than so much is written in the block."""
        number = self.place.stat().st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        try:
            _BLKIO.write_text(f"{device} {bytes_a_second}")
        except OSError as error:
            pytest.skip(f"no disk can be slowed down here: {error}")
        try:
            yield
        finally:
            _BLKIO.write_text(f"{device} 0")


@contextmanager
def image_disk(folder: Path, mebibytes: int) -> Iterator[ImageDisk]:
    """Mounted while in the block."""
    disk = ImageDisk(folder / "disk.image", folder / "disk", mebibytes)
    disk.mount()
    try:
        yield disk
    finally:
        disk.unmount()
