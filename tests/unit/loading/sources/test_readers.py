"""Every reader fills what was asked for with just these bytes, or raises."""

import gc
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.core.errors import UserError
from pipelines.loading.sources import gpu_readers, readers
from pipelines.loading.sources.gpu_readers import (
    BufferedReader,
    PinnedReader,
    open_for_bulk,
    open_reader,
)
from pipelines.loading.sources.readers import MmapReader, Ranges, Reader, read_whole

CPU = torch.device("cpu")
SIZES = (50_000, 4096, 12_289)  # no multiple of a block, one block, one byte more than three


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, bytes]]:
    folder = tmp_path_factory.mktemp("files")
    found = []
    for number, size in enumerate(SIZES):
        path = folder / f"{number}.bin"
        content = np.random.default_rng(number).bytes(size)
        path.write_bytes(content)
        found.append((path, content))
    return found


@pytest.fixture(params=["mmap", "buffered", "pinned", "pinned, buffered"])
def reader(
    request: pytest.FixtureRequest,
    files: list[tuple[Path, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> Reader:
    paths = [path for path, _ in files]
    if request.param == "mmap":
        return MmapReader(paths)
    if request.param == "buffered":
        return BufferedReader(paths)
    if request.param == "pinned, buffered":
        monkeypatch.setattr(gpu_readers, "_takes_direct", lambda path: False)
    return PinnedReader(paths, CPU)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_ranges(reader: Reader, files: list[tuple[Path, bytes]], data: st.DataObject) -> None:
    """Whatever their offsets and lengths, aligned or not, up to a file's last byte."""
    length = data.draw(st.integers(1, 4096) | st.sampled_from([1, 511, 512, 4095, 4096]))
    numbers = data.draw(st.lists(st.integers(0, len(SIZES) - 1), min_size=1, max_size=6))
    offsets = [data.draw(st.integers(0, SIZES[number] - length)) for number in numbers]
    out = torch.zeros(len(numbers), length, dtype=torch.uint8)
    reader.read(Ranges(np.array(numbers), np.array(offsets), length), out)()
    for row, number, offset in zip(out, numbers, offsets, strict=True):
        assert bytes(row.numpy()) == files[number][1][offset : offset + length]


def test_a_large_range_comes_in_pieces(
    reader: Reader, files: list[tuple[Path, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "PIECE", 5000)
    out = torch.zeros(SIZES[0] - 3, dtype=torch.uint8)
    read_whole(reader, 0, 3, out)()
    assert bytes(out.numpy()) == files[0][1][3:]


@pytest.mark.parametrize("length", [1, 100, 4096, 9000])
def test_a_range_past_the_end_is_one_line(reader: Reader, length: int) -> None:
    """Also by one byte, and also from behind the end."""
    for offset in (SIZES[2] - length + 1, SIZES[2] + 5000):
        with pytest.raises(UserError, match=r"2\.bin: .* truncated"):
            read_whole(reader, 2, offset, torch.zeros(length, dtype=torch.uint8))()


def test_o_direct_is_used_where_the_filesystem_has_it(
    files: list[tuple[Path, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the flags that the kernel says the open file has."""
    opened = PinnedReader([files[0][0]], CPU)
    flags = [
        int(line.split()[1], 8)
        for line in Path(f"/proc/self/fdinfo/{opened._files[0]}").read_text().splitlines()
        if line.startswith("flags")
    ]
    assert bool(flags[0] & os.O_DIRECT) == ("O_DIRECT" in opened.name)
    assert opened.name.startswith("pinned, without CUDA unpinned")


def test_a_filesystem_without_o_direct_is_read_buffered(
    files: list[tuple[Path, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As tmpfs does before Linux 6.6: it refuses at the opening."""
    open_file = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return open_file(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with caplog.at_level(logging.INFO):
        opened = PinnedReader([files[0][0]], CPU)
    assert opened.name.endswith("(buffered)")
    assert "refuses O_DIRECT" in caplog.text
    out = torch.zeros(777, dtype=torch.uint8)
    read_whole(opened, 0, 99, out)()
    assert bytes(out.numpy()) == files[0][1][99 : 99 + 777]


def test_closed_with_its_last_use(files: list[tuple[Path, bytes]]) -> None:
    opened = PinnedReader([files[0][0]], CPU)
    descriptor = opened._files[0]
    wait = read_whole(opened, 0, 0, torch.zeros(10, dtype=torch.uint8))
    wait()
    link = Path(f"/proc/self/fd/{descriptor}")
    assert link.resolve() == files[0][0].resolve()
    del opened, wait
    gc.collect()
    assert not link.exists() or link.resolve() != files[0][0].resolve()


def test_an_empty_file_and_an_empty_tensor(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for kind in ("mmap", "pinned"):
        opened = open_reader([tmp_path / "empty"], CPU, kind)  # type: ignore[arg-type]
        read_whole(opened, 0, 0, torch.empty(0))()
        with pytest.raises(UserError, match="truncated"):
            read_whole(opened, 0, 0, torch.empty(1))()


def test_pages_that_come_slowly_are_asked_for_ahead(
    files: list[tuple[Path, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = MmapReader([files[0][0]])
    monkeypatch.setattr(readers, "_COLD_SECONDS", -1.0)  # whatever it takes is slow
    out = torch.zeros(100, dtype=torch.uint8)
    read_whole(opened, 0, 4000, out)()
    assert opened._advise
    read_whole(opened, 0, 4090, out)()  # over the end of a page
    assert bytes(out.numpy()) == files[0][1][4090:4190]


def test_without_a_gpu_bulk_is_read_into_memory(files: list[tuple[Path, bytes]]) -> None:
    assert open_for_bulk([files[0][0]], CPU).name == "buffered"


def test_gds_falls_back_with_one_line(
    files: list[tuple[Path, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_reader([files[0][0]], CPU, "gds")
    assert opened.name.startswith("pinned")
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "GPUDirect Storage is impossible, so pinned buffers are used: there is no CUDA device"
    ]


def test_a_readers_buffer_fits_a_power_of_two() -> None:
    """To which pinned memory is rounded."""
    size = gpu_readers._Buffer(pinned=False).memory.untyped_storage().nbytes()
    assert 0.9 * (8 << 20) < size <= 8 << 20
