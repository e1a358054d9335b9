"""What a run runs on: versions, devices, how they are joined, and the settings that steer them."""

import os
import platform
import shutil
import subprocess
from typing import Any

import torch
import torch.distributed as dist

from pipelines.distributed.mesh import Mesh
from pipelines.planning.hardware import Hardware
from pipelines.planning.roofs import FLOPS_FORMULA

_SETTINGS = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_", "MKL_", "KMP_")
_TOPOLOGY_SECONDS = 20


def machine_report(mesh: Mesh, hardware: Hardware) -> dict[str, Any]:
    """Facts about this process's machine, ready for JSON."""
    report: dict[str, Any] = {
        "layout": vars(mesh.layout),
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "mfu_denominator": hardware.name,
        "mfu_formula": FLOPS_FORMULA,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        },
        "settings": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)
        },
        "cpu": {
            "architecture": platform.machine(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
        },
    }
    if mesh.device.type == "cuda":
        report["gpu"] = _gpus()
    return report


def _gpus() -> dict[str, Any]:
    """Of this node."""
    numbers = range(torch.cuda.device_count())
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]

    def reaches(one: int, other: int) -> bool:
        return one == other or torch.cuda.can_device_access_peer(one, other)

    return {
        "names": [torch.cuda.get_device_name(number) for number in numbers],
        "nccl": ".".join(map(str, version)),
        "peer_access": [[reaches(one, other) for other in numbers] for one in numbers],
        "topology": _topology(),
    }


def _topology() -> list[str] | None:
    """NVIDIA's own table of how devices are joined; None where that can't be had."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, "topo", "-m"], capture_output=True, text=True, timeout=_TOPOLOGY_SECONDS
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def summary(report: dict[str, Any]) -> str:
    """The report in one line of a log."""
    gpu = report.get("gpu")
    what = f"{len(gpu['names'])} x {gpu['names'][0]}, NCCL {gpu['nccl']}" if gpu else "CPU"
    cpu, versions = report["cpu"], report["versions"]
    settings = " ".join(f"{name}={value}" for name, value in report["settings"].items())
    return (
        f"{what}; {cpu['threads']} threads of {cpu['cores']} cores ({cpu['instructions']}); "
        f"torch {versions['torch']}, backend {report['backend'] or 'none'}; "
        f"MFU of {report['mfu_denominator']}; {settings or 'no NCCL, CUDA or OMP settings'}"
    )
