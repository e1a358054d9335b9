import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from pipelines.training.profiling import StepProfiler, exposed_share


def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CPU):
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=device)


def steps(profiler: StepProfiler, first: int, end: int) -> None:
    for step in range(first, end):
        profiler.before(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.after(step, last=step == end - 1)


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


def test_nothing_is_written_unasked(tmp_path: Path) -> None:
    profiler = StepProfiler(None, tmp_path, rank=1, world=2)
    assert profiler.communication_share is None
    steps(profiler, 10, 15)
    assert profiler.communication_share == 0.0  # nobody talked
    assert not list(tmp_path.iterdir())


def test_only_talk_that_nothing_hides_counts() -> None:
    events = [
        event("aten::mm", 0, 40),
        event("gloo:all_reduce", 30, 60),
        event("gloo:all_reduce", 50, 70),
        event("aten::add", 70, 100),
    ]
    assert exposed_share(events) == pytest.approx(0.30)


def test_on_a_gpu_kernels_are_what_counts() -> None:
    events = [
        event("aten::mm", 0, 500),
        event("gemm", 100, 140, DeviceType.CUDA),
        event("ncclDevKernel_AllReduce_Sum_f32", 120, 180, DeviceType.CUDA),
        event("adam", 180, 200, DeviceType.CUDA),
    ]
    assert exposed_share(events) == pytest.approx(0.40)
