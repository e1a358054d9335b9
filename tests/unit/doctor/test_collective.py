"""A real all-reduce here, and what is told of any."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipelines.core.machine import free_port
from pipelines.core.settings import PROJECT
from pipelines.doctor import torch_probe
from pipelines.doctor.all_reduce import Group, Reduced, reason_of, reduced, run_bounded
from pipelines.doctor.findings import FaultError
from pipelines.doctor.throughput import assess_collectives
from pipelines.doctor.torch_probe import Facts
from tests.unit.doctor.recordings import told

EIGHT = Facts(
    devices=8,
    nccl="2.27.5",
    processes=8,
    reduced=Reduced(right=True, bandwidth=480e9),
    pinned=None,
    gds=None,
)


def changed(**values: object) -> Facts:
    return EIGHT.model_copy(update=values)


def test_processes_of_two_machines_meet_by_an_address():
    """Two that know of each other by the address alone, as on two nodes."""
    address = f"tcp://127.0.0.1:{free_port()}"
    groups = [Group(address=address, world=2, first=n, here=1, on_gpu=False) for n in range(2)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda group: reduced(group, 100), groups))
    assert all(each.right and each.bandwidth > 0 for each in results)


def test_one_that_waits_for_nobody_is_ended():
    alone = Group(address=f"tcp://127.0.0.1:{free_port()}", world=2, first=0, here=1, on_gpu=False)
    with pytest.raises(FaultError, match="did not end in"):
        reduced(alone, 0.5)


def test_two_processes_sum_for_real(tmp_path):
    file = tmp_path / "probe"
    file.write_bytes(b"\0" * 4096)
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.doctor.torch_probe", str(file)],
        cwd=PROJECT,
        env={"PATH": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    facts = Facts.model_validate_json(done.stdout)
    assert (facts.devices, facts.nccl, facts.processes) == (0, None, 2)
    assert facts.reduced.right
    assert facts.reduced.bandwidth > 0
    assert facts.gds == "there is no CUDA device"


CUDA = """\
Traceback (most recent call last):
  File "torch/multiprocessing/spawn.py", line 90, in _wrap
    fn(i, *args)
RuntimeError: CUDA error: {}
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace \
below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("no kernel image is available for execution on the device", "get_arch_list()"),
        ("system not yet initialized", "nvidia-fabricmanager"),
        ("forward compatibility was attempted on non supported HW", "cuda-compat"),
        ("invalid device ordinal", "MIG"),
    ],
)
def test_what_cuda_says_is_told_with_its_fix(words, fix):
    program = f"import sys; sys.stderr.write({CUDA.format(words)!r}); sys.exit(1)"
    with pytest.raises(FaultError) as error:
        run_bounded([sys.executable, "-c", program], 60)
    assert str(error.value) == f"an all-reduce failed: RuntimeError: CUDA error: {words}"
    assert fix in error.value.fix


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ("", ""),
        ("Killed\n", "Killed"),
        (
            "torch.distributed.DistBackendError: NCCL error in: x.cpp\nLast error:\nno route\n",
            "torch.distributed.DistBackendError: NCCL error in: x.cpp",
        ),
    ],
)
def test_the_reason_is_the_line_that_names_the_error(errors, reason):
    assert reason_of(errors) == reason


def test_without_a_place_to_write_the_rest_is_asked(monkeypatch, tmp_path):
    """As on a disk that is full or read-only."""
    monkeypatch.setenv("PENSTOCK_HOME", "/proc/self")
    with ExitStack() as stack:
        assert torch_probe._file_to_read(stack) == []
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    with ExitStack() as stack:
        (file,) = torch_probe._file_to_read(stack)
        assert Path(file).stat().st_size == 1 << 20
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("facts", "environ", "lines"),
    [
        (
            EIGHT,
            {},
            [("ok", "NCCL 2.27.5: an all-reduce over 8 processes, bus bandwidth 480 GB/s")],
        ),
        (changed(processes=1), {}, [("ok", "NCCL 2.27.5; one GPU has nobody to send to")]),
        (
            changed(reduced=Reduced(right=False, bandwidth=1.0)),
            {},
            [("problem", "NCCL 2.27.5: an all-reduce over 8 processes gave a wrong sum")],
        ),
        (
            changed(processes=1, pinned="CUDA error: out of memory"),
            {},
            [
                ("ok", "NCCL 2.27.5; one GPU has nobody to send to"),
                ("problem", "memory can't be pinned: CUDA error: out of memory"),
            ],
        ),
        (
            changed(processes=1),
            {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "0"},
            [
                ("ok", "NCCL 2.27.5; one GPU has nobody to send to"),
                ("warning", "NCCL_IB_DISABLE=1 takes a path away from NCCL"),
            ],
        ),
    ],
)
def test_what_is_told(facts, environ, lines):
    assert told(assess_collectives(facts, environ)) == lines
