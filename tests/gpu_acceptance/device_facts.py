"""What the machine is, and how fast bytes come from a file to its GPU."""

import time
from typing import Any

import torch

from pipelines.loading.sources.gpu_readers import why_not
from pipelines.planning.hardware_table import of_driver
from pipelines.training.machine_report import _measure
from tests.benchmarks.__main__ import device
from tests.benchmarks.contenders import gpu_readers_drive, gpu_readers_memmap, gpu_readers_ours
from tests.benchmarks.gpu_readers import FILE, write_file
from tests.benchmarks.page_cache import empty_cache
from tests.gpu_acceptance.acceptance_parts import Outcome, Place

_OVER_MEMMAP = 3
_FILE, _TENSOR = 1 << 30, 64 << 20
_TINY_FILE, _TINY_TENSOR = 32 << 20, 8 << 20


def facts(place: Place) -> Outcome:
    """The machine, and what a product of bf16 matrices and copies reach on it."""
    found = _measure(torch.device(place.device), "fp32" if place.fake else "bf16")
    rate = found.peak("fp32" if place.fake else "bf16") / 1e12
    detail = device() | {
        "memory_bandwidth": found.memory_bandwidth,
        "pcie_bandwidth": found.pcie_bandwidth,
    }
    if place.fake:
        return Outcome(rate, "TFLOP/s", None, False, "the CPU", detail)
    datasheet = of_driver(torch.cuda.get_device_name())
    detail["properties"] = str(torch.cuda.get_device_properties())
    ratio = rate * 1e12 / datasheet.peak("bf16") if datasheet else None
    limits = f"{found.memory_bandwidth / 1e9:,.0f} GB/s memory, PCIe {_rate(found.pcie_bandwidth)}"
    return Outcome(rate, "TFLOP/s bf16", ratio, datasheet is not None, limits, detail)


def _rate(bandwidth: float | None) -> str:
    return f"{(bandwidth or 0) / 1e9:.1f} GB/s"


def readers(place: Place) -> Outcome:
    """Each reader's rate from a cold file, beside `np.memmap` and the drive."""
    size, tensor = (_TINY_FILE, _TINY_TENSOR) if place.fake else (_FILE, _TENSOR)
    options = write_file(place.folder, size, tensor, place.device)
    reason = why_not(place.folder / FILE, torch.device(place.device))
    works: dict[str, Any] = {"drive": gpu_readers_drive, "memmap": gpu_readers_memmap}
    works |= dict.fromkeys(["mmap", "pinned", *["gds"] * (reason is None)], gpu_readers_ours)
    rates = {
        name: _cold(place, work.prepare(place.folder, options | {"reader": name}), size)
        for name, work in works.items()
    }
    ratio = rates["pinned"] / rates["memmap"]
    limits = f"drive {_rate(rates['drive'])}; GPUDirect: {reason or _rate(rates['gds'])}"
    detail = {"rates": rates, "gpudirect": reason or "direct"}
    figure = rates["pinned"] / 1e9
    return Outcome(figure, "GB/s pinned", ratio, ratio >= _OVER_MEMMAP, limits, detail)


def _cold(place: Place, work: Any, size: int) -> float:
    work()  # what is loaded once does not count
    empty_cache(place.folder, {})
    began = time.perf_counter()
    work()
    return size / (time.perf_counter() - began)
