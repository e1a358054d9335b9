"""What accelerators can do at most, from their makers' datasheets; no torch here."""

from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

_TERA = 1e12
_GIGA = 1e9
# One direction of 16 lanes.
_PCIE = {3: 15.75 * _GIGA, 4: 31.5 * _GIGA, 5: 63.0 * _GIGA}


@dataclass(frozen=True)
class Hardware:
    """The roofs of one device.

    Attributes:
        name: For a person, with where the figures are from.
        flops: Multiplications and additions a second in matrix products, by precision; dense,
            so half of what datasheets give with structured sparsity, and summed in fp32.
        memory_bandwidth: Bytes a second between the device and its memory.
        pcie_bandwidth: Bytes a second from the host, one direction; None where the device has
            the host's memory.
    """

    name: str
    flops: dict[Precision, float] = field(hash=False)
    memory_bandwidth: float
    pcie_bandwidth: float | None = None

    def peak(self, precision: Precision) -> float:
        """The rate of a precision; one that the device lacks runs at the rate of fp32."""
        return self.flops.get(precision, self.flops["fp32"])


def _datasheet(
    name: str,
    *,
    fp32: float,
    tf32: float | None = None,
    bf16: float | None = None,
    fp16: float | None = None,
    fp8: float | None = None,
    memory: float,
    pcie: int,
) -> Hardware:
    """TFLOP/s, GB/s and the generation of PCIe, as datasheets give them."""
    rates: dict[Precision, float | None] = {
        "fp32": fp32,
        "tf32": tf32,
        "bf16": bf16,
        "fp16": fp16 or bf16,
        "fp8": fp8,
    }
    flops = {key: rate * _TERA for key, rate in rates.items() if rate is not None}
    return Hardware(f"{name} datasheet, dense", flops, memory * _GIGA, _PCIE[pcie])


_H100 = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp8": 1978.9}
_A100 = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0}

# By the name that the driver gives. Makers' datasheets and architecture white papers: NVIDIA V100
# (2020), T4 (2019), A100 (2022), A10 and RTX A6000 (2021), L4 and L40S (2023), H100 (2023),
# H200 (2024), Blackwell (2024); Ada (RTX 4090) and RTX Blackwell (RTX 5090) white papers,
# appendix A; AMD MI300X (2023).
DATASHEETS: dict[str, Hardware] = {
    "NVIDIA B200": _datasheet(
        "B200", fp32=75.0, tf32=1125.0, bf16=2250.0, fp8=4500.0, memory=8000, pcie=5
    ),
    "NVIDIA H200": _datasheet("H200 SXM", **_H100, memory=4800, pcie=5),
    "NVIDIA H100 80GB HBM3": _datasheet("H100 SXM", **_H100, memory=3350, pcie=5),
    "NVIDIA H100 NVL": _datasheet(
        "H100 NVL", fp32=60.0, tf32=417.5, bf16=835.5, fp8=1670.5, memory=3900, pcie=5
    ),
    "NVIDIA H100 PCIe": _datasheet(
        "H100 PCIe", fp32=51.0, tf32=378.0, bf16=756.0, fp8=1513.0, memory=2000, pcie=5
    ),
    "NVIDIA A100-SXM4-80GB": _datasheet("A100 80GB SXM", **_A100, memory=2039, pcie=4),
    "NVIDIA A100-SXM4-40GB": _datasheet("A100 40GB SXM", **_A100, memory=1555, pcie=4),
    "NVIDIA A100 80GB PCIe": _datasheet("A100 80GB PCIe", **_A100, memory=1935, pcie=4),
    "NVIDIA A100-PCIE-40GB": _datasheet("A100 40GB PCIe", **_A100, memory=1555, pcie=4),
    "NVIDIA L40S": _datasheet(
        "L40S", fp32=91.6, tf32=183.0, bf16=362.1, fp8=733.0, memory=864, pcie=4
    ),
    "NVIDIA L4": _datasheet("L4", fp32=30.3, tf32=60.0, bf16=121.0, fp8=242.5, memory=300, pcie=4),
    "NVIDIA A10": _datasheet("A10", fp32=31.2, tf32=62.5, bf16=125.0, memory=600, pcie=4),
    "NVIDIA RTX A6000": _datasheet(
        "RTX A6000", fp32=38.7, tf32=77.4, bf16=154.8, memory=768, pcie=4
    ),
    "NVIDIA GeForce RTX 5090": _datasheet(
        "RTX 5090", fp32=104.8, tf32=104.8, bf16=209.5, fp8=419.0, memory=1792, pcie=5
    ),
    "NVIDIA GeForce RTX 4090": _datasheet(
        "RTX 4090", fp32=82.6, tf32=82.6, bf16=165.2, fp8=330.3, memory=1008, pcie=4
    ),
    "Tesla V100-SXM2-32GB": _datasheet("V100 SXM2", fp32=15.7, fp16=125.0, memory=900, pcie=3),
    "Tesla V100-SXM2-16GB": _datasheet("V100 SXM2", fp32=15.7, fp16=125.0, memory=900, pcie=3),
    "Tesla T4": _datasheet("T4", fp32=8.1, fp16=65.0, memory=320, pcie=3),
    "AMD Instinct MI300X": _datasheet(
        "MI300X", fp32=163.4, tf32=653.7, bf16=1307.4, fp8=2614.9, memory=5300, pcie=5
    ),
}
