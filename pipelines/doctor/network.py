"""InfiniBand and RoCE: `ibstat`, or where an image has none, the kernel's files that it reads."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.doctor.findings import NotHereError, Seen, ok, problem, warning
from pipelines.doctor.tools import output_of, read, text_of

DEVICES = Path("/sys/class/infiniband")
_FOLDERS = ("/usr/sbin", "/sbin")


@dataclass(frozen=True)
class Port:
    """A port of a network card.

    Attributes:
        rate: Gbit/s, as agreed with the other end.
        layer: `InfiniBand`, or `Ethernet` for RoCE.
    """

    device: str
    kind: str
    state: str
    physical: str
    rate: float
    layer: str

    @property
    def active(self) -> bool:
        """Whether data can pass."""
        return self.state == "Active" and self.physical == "LinkUp"


def rdma() -> Iterator[Seen]:
    """Yield every port of every RDMA device."""
    devices = sorted(path.name for path in DEVICES.glob("*"))
    if not devices:
        raise NotHereError(f"no RDMA device: {DEVICES} is empty")
    try:
        text = output_of("ibstat", folders=_FOLDERS)
    except NotHereError:
        yield from assess_network(list(read_ports(DEVICES)))
        return
    yield from assess_network(read(parse_ibstat, text, "ibstat"))


def read_ports(root: Path) -> Iterator[Port]:
    """Read the ports from sysfs, which writes states such as `4: ACTIVE` and `5: LinkUp`."""
    for port in sorted(root.glob("*/ports/*")):
        values = {name: text_of(port / name) or "" for name in ("state", "phys_state", "rate")}
        state = values["state"].partition(": ")[2]
        yield Port(
            port.parent.parent.name,
            text_of(port.parent.parent / "hca_type") or "",
            "Initializing" if state == "INIT" else state.capitalize(),
            values["phys_state"].partition(": ")[2],
            _rate(values["rate"]),
            text_of(port / "link_layer") or "",
        )


def parse_ibstat(text: str) -> list[Port]:
    """Return all ports.

    Raises:
        ValueError: there is none in it.
    """
    ports, device, kind = [], "", ""
    for block in re.split(r"^(?=CA '|\s+Port \d+:)", text, flags=re.MULTILINE):
        values = dict(re.findall(r"^\s*([\w ]+): (.*)$", block, re.MULTILINE))
        if name := re.match(r"CA '(.+)'", block):
            device, kind = name[1], values.get("CA type", "")
        elif "State" in values:
            ports.append(
                Port(
                    device,
                    kind,
                    values["State"],
                    values.get("Physical state", ""),
                    _rate(values.get("Rate", "")),
                    values.get("Link layer", ""),
                )
            )
    if not ports:
        raise ValueError("no port in it")
    return ports


def _rate(text: str) -> float:
    """0 of a port that tells none."""
    found = re.match(r"\d{1,6}(\.\d+)?", text, re.ASCII)
    return float(found[0]) if found else 0.0


def assess_network(ports: Sequence[Port]) -> Iterator[Seen]:
    """Yield a port that nobody uses is disabled; any other that is not active is a fault."""
    active = [port for port in ports if port.active]
    for port in ports:
        who = f"{port.device} ({port.layer or port.kind})"
        if port.physical == "Polling":
            yield warning(
                f"{who} looks for the other end of its cable",
                "reseat or replace cable and transceiver, see whether the switch's port is "
                "enabled; a port that is to stay empty can be disabled",
            )
        elif port.state == "Initializing":
            fix = "start a subnet manager: opensm on one node, or the switch's own"
            yield warning(f"{who} has a link and no subnet manager", fix)
        elif port.physical == "LinkUp" and not port.active:
            fix = "see the switch's port and the subnet manager's log"
            yield warning(f"{who} has a link, but is {port.state}", fix)
    yield from _slower_than_others(active)
    if active:
        counts = Counter((port.layer, port.rate) for port in active)
        names = (f"{count} x {layer} {rate:g} Gbit/s" for (layer, rate), count in counts.items())
        disabled = sum(port.physical == "Disabled" for port in ports)
        yield ok(", ".join(names) + f"; {disabled} ports are disabled" * bool(disabled))
    else:
        yield problem(f"none of {len(ports)} ports is active", "NCCL will use TCP; see ibstat")


def _slower_than_others(active: Sequence[Port]) -> Iterator[Seen]:
    best: dict[str, float] = {}
    for port in active:
        best[port.kind] = max(best.get(port.kind, 0.0), port.rate)
    for port in active:
        if port.kind and port.rate < best[port.kind]:
            yield warning(
                f"{port.device} runs at {port.rate:g} Gbit/s, its like at {best[port.kind]:g}",
                "look at the cable's rating and the switch's port; one slow rail slows all-reduces",
            )
