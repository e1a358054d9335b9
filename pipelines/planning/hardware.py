"""The peak rates of an accelerator and of the machine around it; no torch here.

The figures are in `hardware_table.py`. A new accelerator of any vendor needs only one entry there,
or in a package of a team's own: docs/extensions.md.
"""

from dataclasses import dataclass, field
from typing import Literal

from pipelines.recipe.training_section import Precision

AttentionFigures = Literal["a100", "h100"]  # devices on which attention's kernels were measured


@dataclass(frozen=True)
class Hardware:
    """The peak rates of one device, and the machine that usually holds it.

    A value that a measurement of one device alone cannot give stays at its default.

    Attributes:
        name: The name shown to users, with the source of the figures.
        flops: Multiplications and additions per second in matrix products, by precision; dense,
            so half of the datasheet figures for structured sparsity, and summed in fp32.
        memory_bandwidth: Bytes per second between the device and its memory.
        pcie_bandwidth: Bytes per second from the host, in one direction; None if the device
            uses the host's memory.
        memory_bytes: The device's memory, as its driver reports it.
        link_bandwidth: Bytes per second from a device to the others of its node, in one
            direction, over NVLink or a similar link, else over PCIe.
        network_bandwidth: Bytes per second from a device to other nodes, in one direction, in
            the usual machine: the node's network divided by its devices.
        devices_per_node: The number of devices in that machine.
        watts: The device's power at full load.
        hourly_price: US dollars for one device rented by the hour; None if no list price was
            found. Prices change: pass your own.
        mfu: Model FLOPs utilisation that well-tuned training in bf16 is published to reach;
            None if no source was found.
        driver_name: The name that its driver and torch give it, by which a run finds this entry;
            None if it is not known.
        attention: The device whose measured attention rates, as a fraction of the peak, also
            apply to this device; see `step_time.py`.
        capability: NVIDIA's compute capability, which says what a GPU's kernels can do; None for
            devices of others.
    """

    name: str
    flops: dict[Precision, float] = field(hash=False)
    memory_bandwidth: float
    pcie_bandwidth: float | None = None
    memory_bytes: int = 0
    link_bandwidth: float = 0.0
    network_bandwidth: float = 0.0
    devices_per_node: int = 1
    watts: float = 0.0
    hourly_price: float | None = None
    mfu: float | None = None
    attention: AttentionFigures = "a100"
    driver_name: str | None = None
    capability: tuple[int, int] | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether the device uses the host's memory."""
        return self.pcie_bandwidth is None

    @property
    def memory_name(self) -> str:
        """The name that reports use for the device's memory as a bottleneck."""
        return "CPU memory" if self.is_cpu else "device-memory bandwidth"

    def peak(self, precision: Precision) -> float:
        """Return the rate of a precision; one that the device lacks runs at fp32's rate."""
        return self.flops.get(precision, self.flops["fp32"])
