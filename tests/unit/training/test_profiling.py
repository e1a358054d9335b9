import gzip
import json
from pathlib import Path

import pytest
import torch

from pipelines.training.profiling import Event, StepProfiler, exposed_share


def steps(profiler: StepProfiler, first: int, end: int) -> None:
    for step in range(first, end):
        profiler.before_step(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.after_step(step, last=step == end - 1)


def test_a_trace_of_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    profiler = StepProfiler((3, 5), tmp_path / "profile", rank=0, world=1)
    steps(profiler, 0, 8)
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "rank-0.json.gz").read_bytes()))
    products = [each for each in trace["traceEvents"] if each.get("name") == "aten::mm"]
    assert len(products) == 2
    assert profiler.communication_share == 0.0


def test_a_run_that_ends_early_still_gives_its_trace(tmp_path: Path) -> None:
    steps(StepProfiler((3, 500), tmp_path, rank=0, world=1), 0, 5)
    assert (tmp_path / "rank-0.json.gz").is_file()


def test_a_run_that_fails_within_the_window_leaves_no_profiler_behind(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError), StepProfiler((0, 5), tmp_path, 0, 1) as profiler:
        profiler.before_step(0)
        raise InterruptedError
    steps(StepProfiler((0, 2), tmp_path, rank=0, world=1), 0, 2)
    assert (tmp_path / "rank-0.json.gz").is_file()


def test_nothing_is_written_unasked(tmp_path: Path) -> None:
    profiler = StepProfiler(None, tmp_path, rank=1, world=2)
    assert profiler.communication_share is None
    steps(profiler, 10, 15)
    assert profiler.communication_share == 0.0  # nobody talked
    assert not list(tmp_path.iterdir())


def test_only_talk_that_nothing_hides_counts() -> None:
    events = [
        Event("aten::mm", 0, 40),
        Event("gloo:all_reduce", 30, 60),
        Event("gloo:all_reduce", 50, 70),
        Event("aten::add", 70, 100),
    ]
    assert exposed_share(events) == pytest.approx(0.30)


def test_on_a_gpu_kernels_are_what_counts() -> None:
    events = [
        Event("aten::mm", 0, 500),
        Event("gemm", 100, 140, on_device=True),
        Event("ncclDevKernel_AllReduce_Sum_f32", 120, 180, on_device=True),
        Event("adam", 180, 200, on_device=True),
    ]
    assert exposed_share(events) == pytest.approx(0.40)


def test_a_build_with_cuda_measures_memory_on_a_machine_without(tmp_path, monkeypatch) -> None:
    def of_the_build(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", of_the_build)
    profiler = StepProfiler(None, tmp_path, rank=0, world=1)
    steps(profiler, 0, 3)
    assert profiler.step_bytes
