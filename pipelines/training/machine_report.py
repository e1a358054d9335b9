"""The machine of a run: its versions, devices, their links, their settings and their limits.

The limits (roofs) of this process's device come from its datasheet, or else from a quick
measurement. The memory of tensors on a CPU, where torch does not count it, comes from a profiled
step.
"""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipelines.models.weights import local
from pipelines.parallel.mesh import Mesh
from pipelines.planning.hardware import Hardware
from pipelines.planning.hardware_table import of_driver
from pipelines.planning.roofs import FLOPS_FORMULA
from pipelines.recipe.training_section import Precision


def memory_in_use(
    device: torch.device,
    modules: Iterable[nn.Module],
    optimizer: Optimizer,
    step_bytes: int | None,
) -> int | None:
    """Return the most bytes that tensors had; None on a CPU until a step was profiled.

    A process's whole memory can't be compared with a plan: in a small run, most is torch itself.

    Args:
        device: The model's device.
        modules: The modules that hold weights and tables.
        optimizer: The optimizer, which holds the moments.
        step_bytes: On a CPU, the most that a step allocates in addition to these.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if step_bytes is None:
        return None
    return step_bytes + _bytes(_held(modules, optimizer))


def _held(modules: Iterable[nn.Module], optimizer: Optimizer) -> Iterable[Tensor]:
    """Yield the tensors that outlive a step, which gradients do not."""
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()
    for state in optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, and count shared storage once."""
    here = (local(each).detach() for each in tensors)
    storages = {each.data_ptr(): each.untyped_storage() for each in here}
    return sum(each.nbytes() for each in storages.values())


_SECONDS = 0.05  # for each measurement
_TYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # a plain matrix product does not support fp8
}


def hardware_of(device: torch.device, precision: Precision) -> Hardware:
    """Return the device's datasheet if its name is known, or else its measured limits."""
    if device.type == "cuda":
        datasheet = of_driver(torch.cuda.get_device_name(device))
        if datasheet is not None:
            return datasheet
    return _measure(device, precision)


@lru_cache  # once in a process
def _measure(device: torch.device, precision: Precision) -> Hardware:
    """Measure square matrix products and copies; the best within the time counts."""
    on_cpu = device.type == "cpu"
    kind = _TYPES[precision]
    width = 768 if on_cpu else 4096
    left, right = torch.ones(2, width, width, dtype=kind, device=device).unbind()
    out = torch.empty_like(left)
    flops = 2 * width**3 / _best(lambda: torch.mm(left, right, out=out), device)
    # Larger than the caches: 64 MiB on a CPU.
    source = torch.ones((16 if on_cpu else 256) << 20, device=device)
    into = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _best(lambda: into.copy_(source), device)
    who = f"{torch.get_num_threads()}-thread" if on_cpu else device.type
    what = str(kind).removeprefix("torch.")
    name = f"measured {who} {what} matrix product, {flops / 1e9:.0f} GFLOP/s"
    rates: dict[Precision, float] = {"fp32": flops, precision: flops}
    return Hardware(name, rates, bandwidth, None if on_cpu else _host_bandwidth(device))


def _host_bandwidth(device: torch.device) -> float:
    """Return the bytes a second that a copy from pinned host memory reaches."""
    source = torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
    into = torch.empty_like(source, device=device)
    return source.nbytes / _best(lambda: into.copy_(source, non_blocking=True), device)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest round; the first round is a warm-up."""
    best, ends = float("inf"), None
    while ends is None or time.perf_counter() < ends:
        started = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        now = time.perf_counter()
        if ends is None:
            ends = now + _SECONDS
        else:
            best = min(best, now - started)
    return best


_SETTINGS = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_", "MKL_", "KMP_")
_TOPOLOGY_SECONDS = 20


def machine_report(mesh: Mesh, hardware: Hardware) -> dict[str, Any]:
    """Return facts about this process's machine, ready for JSON."""
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
    """Describe this node's GPUs."""
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
    """Return nvidia-smi's table of the links between devices, or None if it is unavailable."""
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
    """Return the report as one log line."""
    gpu = report.get("gpu")
    what = f"{len(gpu['names'])} x {gpu['names'][0]}, NCCL {gpu['nccl']}" if gpu else "CPU"
    cpu, versions = report["cpu"], report["versions"]
    settings = " ".join(f"{name}={value}" for name, value in report["settings"].items())
    return (
        f"{what}; {cpu['threads']} threads of {cpu['cores']} cores ({cpu['instructions']}); "
        f"torch {versions['torch']}, backend {report['backend'] or 'none'}; "
        f"MFU of {report['mfu_denominator']}; {settings or 'no NCCL, CUDA or OMP settings'}"
    )
