"""What a full disk and a crash do to a file of lines; the disk is as full as a limit makes it."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipelines.core.line_files import LineFile


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process may be larger; a write beyond it ends half-way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_a_crash_tore_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one\ntwo\nthr")
    file = LineFile(path)
    assert file.read() == ["one", "two"]
    file.append("three")
    assert path.read_text() == "one\ntwo\nthree\n"


def test_a_torn_line_goes_though_nobody_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one\ntw")
    LineFile(path).append("two")
    assert path.read_text() == "one\ntwo\n"


def test_lines_wait_for_a_disk_that_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = LineFile(tmp_path / "below" / "file")
    file.append("0" * 9)
    with room_for(15):
        file.append("1" * 9)
        file.append("2" * 9)
    assert (tmp_path / "below" / "file").read_text().startswith("000000000\n")
    assert "the last lines could not be written yet" in caplog.text
    file.append("3" * 9)
    assert LineFile(file.path).read() == [digit * 9 for digit in "0123"]


def test_a_file_that_is_to_be_replaced_waits_too(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "file")
    for digit in "0123":
        file.append(digit * 9)
    with room_for(15):
        file.replace(["a" * 9, "b" * 9])
        file.append("c" * 9)
    assert file.path.read_text().count("\n") == 4  # the old one, whole
    file.append("d" * 9)
    assert LineFile(file.path).read() == [letter * 9 for letter in "abcd"]
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
