import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipelines.training.checkpoint import dcp_files
from pipelines.training.checkpoint.dcp_files import CheckpointReader, CheckpointWriter


def test_the_place_is_made_ready_by_one_process_once_all_have_planned(tmp_path: Path) -> None:
    place = tmp_path / "step-000001"
    place.mkdir()
    (place / "torn").touch()
    first, other = (
        CheckpointWriter(str(place), (place / "torn").unlink, lambda: None) for _ in range(2)
    )
    plans = [each.prepare_local_plan(SavePlan([])) for each in (other, first)]
    assert (place / "torn").exists()  # nobody has touched anything that another may be clearing
    first.prepare_global_plan(plans)
    assert list(place.iterdir()) == []


def test_the_drive_writes_a_file_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def noting(file: int, start: int, length: int, what: int) -> None:
        assert what == os.POSIX_FADV_DONTNEED
        advise(file, start, length, what)
        advised.append((start, start + length))

    monkeypatch.setattr(os, "posix_fadvise", noting)
    monkeypatch.setattr(dcp_files, "_EARLY", 1 << 16)
    state: dict[str, Any] = {str(number): torch.randn(100 << number) for number in range(10)}
    writer = CheckpointWriter(str(tmp_path / "saved"), lambda: None, lambda: None)
    save(state, storage_writer=writer, no_dist=True)
    (file,) = (tmp_path / "saved").glob("*.distcp")
    assert [start for start, _ in advised] == [0, *(end for _, end in advised[:-1])]
    assert file.stat().st_size - (1 << 16) < advised[-1][1] <= file.stat().st_size
    monkeypatch.undo()
    read = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(read, storage_reader=CheckpointReader(tmp_path / "saved"), no_dist=True)
    assert all(torch.equal(read[name], state[name]) for name in state)
