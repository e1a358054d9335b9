"""GPUDirect: each missing piece by name, and the mode in effect."""

from dataclasses import replace

import pytest

from pipelines.doctor.gpudirect import (
    Storage,
    assess_rdma,
    assess_storage,
    parse_gdscheck,
    parse_modules,
)
from pipelines.doctor.host import Mount
from tests.unit.doctor.recordings import recorded, told

XFS = Mount("/data", "xfs", "/dev/md127", {"rw": ""})
WHOLE = Storage(
    module=True,
    devices=["nvidia-fs0"],
    config="/etc/cufile.json",
    may_lock=True,
    mount=XFS,
    modes=parse_gdscheck(recorded("gdscheck_nvme.txt")),
    why_not=None,
)


def test_gdschecks_table_is_read():
    modes = parse_gdscheck(recorded("gdscheck_nvidia_sample.txt"))
    assert modes["NVMe"] == "nvfs, compat"
    assert modes["WekaFS"] == "dmabuf, compat"
    assert modes["Mellanox PeerDirect"] == "Disabled"
    assert "properties.use_compat_mode" not in modes
    assert parse_gdscheck(recorded("gdscheck_no_gpu.txt"))["NVMe"] == "compat"


def test_where_all_is_there_the_mode_is_direct():
    assert told(assess_storage(WHOLE)) == [
        ("ok", "mode in effect under /data: direct, proven by a read")
    ]


@pytest.mark.parametrize(
    ("change", "saw"),
    [
        ({"module": False}, "the kernel module nvidia-fs is not loaded"),
        ({"devices": []}, "no /dev/nvidia-fs* here, though the module is loaded"),
        ({"config": None}, "no cufile.json"),
        ({"may_lock": False}, "memory may not be locked"),
        ({"mount": replace(XFS, kind="btrfs")}, "GPUDirect Storage does not know btrfs"),
        ({"mount": replace(XFS, kind="nfs4")}, "gdscheck on nfs4 (NFS): Unsupported"),
        (
            {"modes": parse_gdscheck(recorded("gdscheck_no_gpu.txt"))},
            "gdscheck on xfs (NVMe): compat",
        ),
    ],
)
def test_each_missing_piece_is_named(change, saw):
    reason = {"why_not": "compatibility mode: the kernel driver nvidia-fs isn't loaded"}
    found = told(assess_storage(replace(WHOLE, **change, **reason)))
    assert found == [
        ("warning", saw),
        ("warning", f"mode in effect under /data: pinned buffers; {reason['why_not']}"),
    ]


def test_a_read_that_went_direct_needs_no_module():
    """As by the kernel's own peer-to-peer DMA, of CUDA 12.8 and Linux 6.2 on."""
    found = told(assess_storage(replace(WHOLE, module=False, devices=[], config=None)))
    assert [state for state, _ in found] == ["ok"]


def test_without_gdscheck_the_read_decides():
    assert [state for state, _ in told(assess_storage(replace(WHOLE, modes=None)))] == ["ok"]


MODULES = "nvidia_peermem 16384 0 - Live 0x0\nib_core 425984 9 rdma_cm, Live 0x0\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"


@pytest.mark.parametrize(
    ("modules", "driver", "kernel", "state"),
    [
        (MODULES, "", "5.4.0-26-generic", "ok"),
        ("", OPEN, "6.8.0-60-generic", "ok"),
        ("", OPEN, "5.4.0-26-generic", "warning"),
        ("", OPEN.replace("Open Kernel", "Kernel"), "6.8.0-60-generic", "warning"),
    ],
)
def test_rdma_by_module_or_by_shared_buffers(modules, driver, kernel, state):
    ((found, _),) = told(assess_rdma(parse_modules(modules), driver, kernel))
    assert found == state
