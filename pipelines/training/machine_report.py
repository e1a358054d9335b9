"""What a run runs on: versions, devices, how they are joined, and the settings that steer them.

What tensors take on a device; on a CPU, where torch keeps no count, as a profiled step shows.

The roofs of this process's device: from its datasheet, or else measured in a moment.
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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pipelines.parallel.mesh import Mesh
from pipelines.planning.hardware import Hardware, Precision
from pipelines.planning.hardware_table import DATASHEETS
from pipelines.planning.roofs import FLOPS_FORMULA


def memory_in_use(
    device: torch.device,
    modules: Iterable[nn.Module],
    optimizer: Optimizer,
    step_bytes: int | None,
) -> int | None:
    """The most bytes that tensors have had on a device; None on a CPU until a step was looked into.

    A process's whole memory is none to compare with a plan: most of a small run's is torch itself.

    Args:
        device: Of the model.
        modules: That hold weights and tables.
        optimizer: Whose moments there are.
        step_bytes: On a CPU, what a step allocates at most beside those.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if step_bytes is None:
        return None
    return step_bytes + _bytes(_held(modules, optimizer))


def _held(modules: Iterable[nn.Module], optimizer: Optimizer) -> Iterable[Tensor]:
    """Tensors that outlive a step; gradients are made anew in each."""
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()
    for state in optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of storages, each once."""
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    storages = {each.data_ptr(): each.untyped_storage() for each in map(Tensor.detach, local)}
    return sum(each.nbytes() for each in storages.values())


_SECONDS = 0.05  # for each measurement
_TYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # no plain product takes it
}


def hardware_of(device: torch.device, precision: Precision) -> Hardware:
    """Its datasheet where the driver gives a name that is known, and what it does otherwise."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if name in DATASHEETS:
            return DATASHEETS[name]
    return _measure(device, precision)


@lru_cache  # once in a process
def _measure(device: torch.device, precision: Precision) -> Hardware:
    """Square products and copies, the best of those that fit into the time."""
    on_cpu = device.type == "cpu"
    kind = _TYPES[precision]
    width = 768 if on_cpu else 4096
    left, right = torch.ones(2, width, width, dtype=kind, device=device).unbind()
    out = torch.empty_like(left)
    flops = 2 * width**3 / _best(lambda: torch.mm(left, right, out=out), device)
    # Larger than caches: 64 MiB on a CPU.
    source = torch.ones((16 if on_cpu else 256) << 20, device=device)
    into = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _best(lambda: into.copy_(source), device)
    who = f"{torch.get_num_threads()}-thread" if on_cpu else device.type
    what = str(kind).removeprefix("torch.")
    name = f"measured {who} {what} matrix product, {flops / 1e9:.0f} GFLOP/s"
    rates: dict[Precision, float] = {"fp32": flops, precision: flops}
    return Hardware(name, rates, bandwidth, None if on_cpu else _host_bandwidth(device))


def _host_bandwidth(device: torch.device) -> float:
    """Bytes a second from pinned memory."""
    source = torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
    into = torch.empty_like(source, device=device)
    return source.nbytes / _best(lambda: into.copy_(source, non_blocking=True), device)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest round; the first one only warms up."""
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
