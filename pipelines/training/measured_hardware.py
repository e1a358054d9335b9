"""The roofs of this process's device: from its datasheet, or else measured in a moment."""

import time
from collections.abc import Callable
from functools import lru_cache

import torch

from pipelines.planning.hardware import Hardware, Precision
from pipelines.planning.hardware_table import DATASHEETS

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
