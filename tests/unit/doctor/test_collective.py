"""A real all-reduce here, and what is told of any."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from pipelines.core.settings import PROJECT
from pipelines.doctor.collective import judge
from pipelines.doctor.torch_probe import Facts
from tests.unit.doctor.recordings import told

EIGHT = Facts(8, "2.27.5", "nccl", 8, True, 480e9, None, None)


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
    facts = Facts(**json.loads(done.stdout))
    assert (facts.devices, facts.backend, facts.processes) == (0, "gloo", 2)
    assert facts.right
    assert facts.bandwidth > 0
    assert facts.gds == "there is no CUDA device"


@pytest.mark.parametrize(
    ("facts", "environ", "lines"),
    [
        (
            EIGHT,
            {},
            [("ok", "NCCL 2.27.5: an all-reduce over 8 processes, bus bandwidth 480 GB/s")],
        ),
        (replace(EIGHT, processes=1), {}, [("ok", "NCCL 2.27.5; one GPU has nobody to send to")]),
        (
            replace(EIGHT, right=False),
            {},
            [("problem", "NCCL 2.27.5: an all-reduce over 8 processes gave a wrong sum")],
        ),
        (
            replace(EIGHT, processes=1, pinned="CUDA error: out of memory"),
            {},
            [
                ("ok", "NCCL 2.27.5; one GPU has nobody to send to"),
                ("problem", "memory can't be pinned: CUDA error: out of memory"),
            ],
        ),
        (
            replace(EIGHT, processes=1),
            {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "0"},
            [
                ("ok", "NCCL 2.27.5; one GPU has nobody to send to"),
                ("warning", "NCCL_IB_DISABLE=1 takes a path away from NCCL"),
            ],
        ),
    ],
)
def test_what_is_told(facts, environ, lines):
    assert told(judge(facts, environ)) == lines
