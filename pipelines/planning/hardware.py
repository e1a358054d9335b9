"""What an accelerator and the machine around it can do at most; no torch here.

The figures are in `hardware_table.py`. A new accelerator of any vendor is one entry there: planning
asks nothing else of it.
"""

from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
AttentionFigures = Literal["a100", "h100"]  # devices on which attention's kernels were measured


@dataclass(frozen=True)
class Hardware:
    """The roofs of one device, and its place among others.

    What a measurement of one device alone does not say stays at its default.

    Attributes:
        name: For a user, with where the figures are from.
        flops: Multiplications and additions a second in matrix products, by precision; dense,
            so half of what datasheets give with structured sparsity, and summed in fp32.
        memory_bandwidth: Bytes a second between the device and its memory.
        pcie_bandwidth: Bytes a second from the host, one direction; None where the device has
            the host's memory.
        memory_bytes: Of the device's memory, as its driver reports them.
        link_bandwidth: Bytes a second from a device to the others of its node, one direction:
            NVLink or its like, PCIe where there is none.
        network_bandwidth: Bytes a second from a device to other nodes, one direction, in the
            usual machine: the node's network divided by its devices.
        devices_per_node: In that machine.
        watts: Of the device at full load.
        hourly_price: US dollars for one device rented by the hour; None where no list price was
            found. Prices move: pass your own.
        mfu: Model FLOPs utilisation that well-tuned training reaches in bf16 by publication;
            None where no source was found.
        attention: Whose figures hold for attention, as a part of the peak; see
            `step_time.py`.
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

    @property
    def is_cpu(self) -> bool:
        """Whether its memory is the host's."""
        return self.pcie_bandwidth is None

    @property
    def memory_name(self) -> str:
        """What is said to bind where its memory does."""
        return "CPU memory" if self.is_cpu else "device-memory bandwidth"

    def peak(self, precision: Precision) -> float:
        """The rate of a precision; one that the device lacks runs at the rate of fp32."""
        return self.flops.get(precision, self.flops["fp32"])
