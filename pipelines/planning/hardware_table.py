"""Accelerators by name, with the source of every figure; one entry is one accelerator.

Rates, bandwidths and power are from makers' datasheets and architecture white papers: NVIDIA V100
(2020), T4 (2019), A100 (2022), A10, RTX A4000 and RTX A6000 (2021), L4 and L40S (2023), H100
(2023), H200 (2024), Blackwell (2024); Ada (RTX 4090) and RTX Blackwell (RTX 5090) white papers,
appendix A; AMD MI300X (2023); Google's system architecture pages of TPU v3 and v4; Intel's page of
the Xeon 8480+, and Kaplan's talk at Hot Chips 2024 (Gaudi 2).

Memory is the size that `nvidia-smi` reports, which is less than the nominal size if error
correction uses a part.

Machines: NVIDIA DGX-1V, DGX A100, DGX H100, H200 and B200, and AMD's MI300X platform with eight
400 Gbit/s adapters. Cards without NVLink are counted as eight in a cloud machine (AWS g4dn.metal,
g5 and g6.48xlarge: 100 Gbit/s; g6e.48xlarge: 400 Gbit/s).

MFU: LLM Foundry's benchmark tables (H100 and A100, 1B to 70B at a sequence length of 2048, FSDP);
Megatron-LM (Shoeybi et al. 2019) for V100; PaLM (Chowdhery et al. 2022, table 3) for TPU v3 and v4;
Databricks' blog of January 2024 for Gaudi 2.
"""

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.core import extensions
from pipelines.core.checked_yaml import read_yaml
from pipelines.core.errors import UserError
from pipelines.planning.hardware import Hardware
from pipelines.recipe.training_section import Precision

_TERA = 1e12
_GIGA = 1e9
_MIB = 2**20
# GB/s of 16 lanes in one direction, by PCIe generation.
_PCIE = {3: 15.75, 4: 31.5, 5: 63.0}
_GBIT = 1 / 8  # GB/s


# Prices are in a separate file, since a price changes no layout and so no model.
_PRICES: dict[str, float] = read_yaml(Path(__file__).with_name("prices.yaml"))
# Fractions of the bf16 peak (fp16 on a V100), for 2048 tokens and medium models and clusters.
_MFU = {
    "h200": 0.42,  # the H100's MFU: the same chip with more memory
    "h100": 0.42,  # 41.8% with 1B, 46.4% with 7B, 39.8% with 13B, 42.6% with 70B
    "a100-80": 0.57,  # 59.9% with 1B, 59.6% with 13B, 55.3% with 30B, 53.3% with 70B
    "a100-40": 0.52,  # 50.9% with 7B, 52.0% with 13B, 52.2% with 30B
    "v100-32": 0.30,  # 39 TFLOP/s with 1.2B on one
    "v100-16": 0.30,
    "tpu-v4": 0.462,
    "tpu-v3": 0.325,  # Gopher
    "gaudi2": 0.60,  # 260 TFLOP/s with MPT-7B on 8
}


def _device(
    name: str,
    flops: tuple[float | None, ...],
    *,
    fp16: float | None = None,
    mib: int,
    bandwidth: float,
    pcie: int | None,
    watts: float,
    link: float | None = None,
    network: float = 100 * _GBIT / 8,
    per_node: int = 8,
) -> Hardware:
    """Convert a maker's figures: TFLOP/s by `_RATES`, MiB, one-way GB/s and PCIe generation."""
    rates: dict[Precision, float | None] = dict(zip(_RATES, flops, strict=False))
    rates["fp16"] = fp16 or rates.get("bf16")
    host = None if pcie is None else _PCIE[pcie] * _GIGA
    return Hardware(
        name=f"{name} datasheet, dense",
        flops={key: rate * _TERA for key, rate in rates.items() if rate is not None},
        memory_bandwidth=bandwidth * _GIGA,
        pcie_bandwidth=host,
        memory_bytes=mib * _MIB,
        link_bandwidth=host or 0.0 if link is None else link * _GIGA,
        network_bandwidth=network * _GIGA,
        devices_per_node=per_node,
        watts=watts,
    )


CPU_CORES = 56  # the cores of the entry `cpu`
_RATES: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp8")
_H100 = (66.9, 494.7, 989.4, 1978.9)
_A100 = (19.5, 156.0, 312.0)
# Each DGX has its generation's NVLink and a network adapter per device (DGX-1V: one per two).
_DGX_1V: dict[str, Any] = {"link": 150, "network": 100 * _GBIT / 2}
_V100: dict[str, Any] = {"fp16": 125, "bandwidth": 900, "pcie": 3, "watts": 300, **_DGX_1V}
_DGX_A100: dict[str, Any] = {"link": 300, "network": 200 * _GBIT}
_DGX_H100: dict[str, Any] = {"link": 450, "network": 400 * _GBIT}
_DGX_B200: dict[str, Any] = {"link": 900, "network": 400 * _GBIT}
# Consumer cards have no reference machine: 10 Gbit/s for eight is an assumption.
_RENTED_HOST: dict[str, Any] = {"network": 10 * _GBIT / 8}


def _tpu(name: str, bf16: float, *, bandwidth: float, watts: float, link: float) -> Hardware:
    """Return a TPU; a slice is one fabric across hosts, and XLA makes fp32 of six bf16 passes."""
    return _device(
        name,
        (bf16 / 6, None, bf16),
        mib=32 * 1024,
        bandwidth=bandwidth,
        pcie=3,
        watts=watts,
        link=link,
        network=link,
        per_node=4,
    )


# The key is the name in commands; the value is the driver's name, if any, and the device.
_DEVICES: dict[str, tuple[str | None, Hardware]] = {
    "b200": (
        "NVIDIA B200",
        _device(
            "B200",
            (75, 1125, 2250, 4500),
            mib=183_359,
            bandwidth=8000,
            pcie=5,
            watts=1000,
            **_DGX_B200,
        ),
    ),
    "h200": (
        "NVIDIA H200",
        _device("H200 SXM", _H100, mib=143_771, bandwidth=4800, pcie=5, watts=700, **_DGX_H100),
    ),
    "h100": (
        "NVIDIA H100 80GB HBM3",
        _device("H100 SXM", _H100, mib=81_559, bandwidth=3350, pcie=5, watts=700, **_DGX_H100),
    ),
    "h100-nvl": (
        "NVIDIA H100 NVL",
        _device(
            "H100 NVL", (60.0, 417.5, 835.5, 1670.5), mib=95_830, bandwidth=3900, pcie=5, watts=400
        ),
    ),
    "h100-pcie": (
        "NVIDIA H100 PCIe",
        _device("H100 PCIe", (51, 378, 756, 1513), mib=81_559, bandwidth=2000, pcie=5, watts=350),
    ),
    "a100-80": (
        "NVIDIA A100-SXM4-80GB",
        _device("A100 80GB SXM", _A100, mib=81_920, bandwidth=2039, pcie=4, watts=400, **_DGX_A100),
    ),
    "a100-40": (
        "NVIDIA A100-SXM4-40GB",
        _device("A100 40GB SXM", _A100, mib=40_960, bandwidth=1555, pcie=4, watts=400, **_DGX_A100),
    ),
    "a100-80-pcie": (
        "NVIDIA A100 80GB PCIe",
        _device("A100 80GB PCIe", _A100, mib=81_920, bandwidth=1935, pcie=4, watts=300),
    ),
    "a100-40-pcie": (
        "NVIDIA A100-PCIE-40GB",
        _device("A100 40GB PCIe", _A100, mib=40_960, bandwidth=1555, pcie=4, watts=250),
    ),
    "l40s": (
        "NVIDIA L40S",
        _device(
            "L40S",
            (91.6, 183.0, 362.1, 733.0),
            mib=46_068,
            bandwidth=864,
            pcie=4,
            watts=350,
            network=400 * _GBIT / 8,
        ),
    ),
    "l4": (
        "NVIDIA L4",
        _device("L4", (30.3, 60.0, 121.0, 242.5), mib=23_034, bandwidth=300, pcie=4, watts=72),
    ),
    "a10": (
        "NVIDIA A10",
        _device("A10", (31.2, 62.5, 125.0), mib=23_028, bandwidth=600, pcie=4, watts=150),
    ),
    "a6000": (
        "NVIDIA RTX A6000",
        _device("RTX A6000", (38.7, 77.4, 154.8), mib=49_140, bandwidth=768, pcie=4, watts=300),
    ),
    "a4000": (
        "NVIDIA RTX A4000",
        _device("RTX A4000", (19.2, 38.3, 76.7), mib=16_376, bandwidth=448, pcie=4, watts=140),
    ),
    "rtx5090": (
        "NVIDIA GeForce RTX 5090",
        _device(
            "RTX 5090",
            (104.8, 104.8, 209.5, 419.0),
            mib=32_607,
            bandwidth=1792,
            pcie=5,
            watts=575,
            **_RENTED_HOST,
        ),
    ),
    "rtx4090": (
        "NVIDIA GeForce RTX 4090",
        _device(
            "RTX 4090",
            (82.6, 82.6, 165.2, 330.3),
            mib=24_564,
            bandwidth=1008,
            pcie=4,
            watts=450,
            **_RENTED_HOST,
        ),
    ),
    "v100-32": (
        "Tesla V100-SXM2-32GB",
        _device("V100 SXM2", (15.7,), mib=32_768, **_V100),
    ),
    "v100-16": (
        "Tesla V100-SXM2-16GB",
        _device("V100 SXM2", (15.7,), mib=16_384, **_V100),
    ),
    "t4": (
        "Tesla T4",
        _device("T4", (8.1,), fp16=65.0, mib=15_360, bandwidth=320, pcie=3, watts=70),
    ),
    # Infinity Fabric: seven links of 64 GB/s.
    "mi300x": (
        "AMD Instinct MI300X",
        _device(
            "MI300X",
            (163.4, 653.7, 1307.4, 2614.9),
            mib=192 * 1024,
            bandwidth=5300,
            pcie=5,
            watts=750,
            link=7 * 64,
            network=400 * _GBIT,
        ),
    ),
    # TPU v4 has six links of 50 GB/s; v3 has four of 656 Gbit/s (Jouppi et al. 2020, table 3).
    "tpu-v4": (None, _tpu("TPU v4", 275.0, bandwidth=1200, watts=192, link=6 * 50)),
    "tpu-v3": (None, _tpu("TPU v3", 123.0, bandwidth=900, watts=262, link=4 * 656 * _GBIT)),
    # 21 of its 100 Gbit/s ports lead to the seven other devices, three to other nodes. No fp32 rate
    # of products is published: a sixteenth of bf16's is an assumption.
    "gaudi2": (
        None,
        _device(
            "Gaudi 2",
            (432.0 / 16, None, 432.0, 865.0),
            mib=96 * 1024,
            bandwidth=2450,
            pcie=4,
            watts=600,
            link=21 * 100 * _GBIT,
            network=3 * 100 * _GBIT,
        ),
    ),
    # One of two Xeon Platinum 8480+ sockets of an AWS m7i.48xlarge (768 GiB, 50 Gbit/s): 56 cores
    # at 2.0 GHz, 64 FLOP per cycle in AVX-512 and 2048 in AMX; four UPI links of 48 GB/s.
    "cpu": (
        None,
        _device(
            "Xeon 8480+",
            (7.17, None, 229.0),
            mib=384 * 1024,
            bandwidth=307.2,
            pcie=None,
            watts=350,
            link=4 * 48,
            network=50 * _GBIT / 2,
            per_node=2,
        ),
    ),
}
# Attention kernels reach the same fraction of the peak on all Hopper devices; for a B200 this is
# an assumption.
_LIKE_H100 = ("b200", "h200", "h100", "h100-nvl", "h100-pcie")
# By generation: Blackwell for data centres and for graphics, Hopper, Ada, Ampere for both, Turing,
# Volta (NVIDIA's table of CUDA GPUs).
_CAPABILITIES = {
    (10, 0): ("b200",),
    (12, 0): ("rtx5090",),
    (9, 0): ("h200", "h100", "h100-nvl", "h100-pcie"),
    (8, 9): ("l40s", "l4", "rtx4090"),
    (8, 6): ("a10", "a6000", "a4000"),
    (8, 0): ("a100-80", "a100-40", "a100-80-pcie", "a100-40-pcie"),
    (7, 5): ("t4",),
    (7, 0): ("v100-32", "v100-16"),
}
_CAPABILITY = {name: each for each, names in _CAPABILITIES.items() for name in names}
ENTRIES: dict[str, Hardware] = {
    key: replace(
        device,
        hourly_price=_PRICES.get(key),
        mfu=_MFU.get(key),
        attention="h100" if key in _LIKE_H100 else "a100",
        driver_name=driver,
        capability=_CAPABILITY.get(key),
    )
    for key, (driver, device) in _DEVICES.items()
}


def entries() -> dict[str, Hardware]:
    """Return all accelerators by name: Penstock's own, and those of a team's packages."""
    own = extensions.names("accelerators")
    return ENTRIES | {name: extensions.load("accelerators", name) for name in own}


def of_driver(name: str) -> Hardware | None:
    """Return the accelerator that its driver calls so, or None."""
    return next((each for each in entries().values() if each.driver_name == name), None)


def named(name: str) -> Hardware:
    """Return the entry of that name; raise UserError with the known names if there is none."""
    known = entries()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UserError(f"no accelerator {name!r}: {hint}the known names are {', '.join(known)}")
