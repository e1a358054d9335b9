"""Network planes: which interfaces carry storage, GPU to GPU, inference and users.

PENSTOCK_NETWORK_PLANES names them: `storage=ib4,ib5 gpu=ib0,ib1 inference=eth1 users=eth0`.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.doctor.findings import NotHereError, Seen, ok, problem, warning
from pipelines.doctor.tools import text_of

VARIABLE = "PENSTOCK_NETWORK_PLANES"
_INTERFACES = Path("/sys/class/net")
_GIB = 1 << 30
_MBIT = 1e6 / 8
# The class of each plane, GiB/s of a node: what this project asks of a cluster's network.
CLASSES = {"storage": (80, 120), "gpu": (20, 40), "inference": (1, 10), "users": (0.1, 1)}


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        speed: Bytes/s, as agreed with the other end; None where the driver does not say.
        roots: The physical interfaces below it, of a bond or VLAN; itself otherwise.
    """

    name: str
    up: bool
    speed: float | None
    roots: frozenset[str]


def planes() -> Iterator[Seen]:
    """Yield each plane by its interfaces."""
    text = os.environ.get(VARIABLE, "")
    if not text.strip():
        example = f"{VARIABLE}='storage=ib4 gpu=ib0,ib1 users=eth0'"
        raise NotHereError(f"no plane is named; {example} would")
    named = parse_planes(text)
    found = {name: read_interface(name) for names in named.values() for name in names}
    yield from assess_planes(named, found, os.environ)


def parse_planes(text: str) -> dict[str, list[str]]:
    """Interfaces by plane.

    Raises:
        UserError: a plane that there is not, or no interface.
    """
    named: dict[str, list[str]] = {}
    for word in text.split():
        plane, _, interfaces = word.partition("=")
        names = [name for name in interfaces.split(",") if name]
        if plane not in CLASSES or not names:
            raise UserError(
                f"{VARIABLE}: {word!r} is no PLANE=INTERFACE[,INTERFACE…]; planes are "
                f"{', '.join(CLASSES)}"
            )
        named[plane] = names
    return named


def read_interface(name: str, root: Path = _INTERFACES) -> Interface | None:
    """Return what the kernel says of it; None where there is none by that name."""
    folder = root / name
    if not folder.is_dir():
        return None
    rate = text_of(folder / "speed")
    mbit = int(rate) if rate and rate.lstrip("-").isdigit() else -1
    return Interface(
        name,
        # `unknown` is of drivers that do not tell, as the loopback's: the kernel has them used.
        text_of(folder / "operstate") in ("up", "unknown"),
        mbit * _MBIT if mbit > 0 else _infiniband_speed(folder),
        frozenset(_roots(folder)),
    )


def _infiniband_speed(folder: Path) -> float | None:
    """IPoIB's drivers give none: the rate of its device's first port."""
    for rate in sorted(folder.glob("device/infiniband/*/ports/*/rate")):
        if found := re.match(r"(\d+) Gb/sec", text_of(rate) or ""):
            return int(found[1]) * 1000 * _MBIT
    return None


def _roots(folder: Path) -> Iterator[str]:
    lower = sorted(folder.glob("lower_*"))
    for each in lower:
        yield from _roots(folder.parent / each.name.removeprefix("lower_"))
    if not lower:
        yield folder.name


def assess_planes(
    named: Mapping[str, list[str]],
    found: Mapping[str, Interface | None],
    environ: Mapping[str, str],
) -> Iterator[Seen]:
    """Yield each plane against its class, and storage and NCCL apart."""
    for plane, names in named.items():
        if missing := [name for name in names if found[name] is None]:
            saw = f"{plane}: no interface {', '.join(missing)} on this node"
            yield problem(saw, f"`ip link` lists them; fix {VARIABLE}")
            continue
        yield _assess_plane(plane, [each for name in names if (each := found[name])])
    shared = _roots_of("storage", named, found) & _roots_of("gpu", named, found)
    if shared:
        yield warning(
            f"storage and NCCL share {', '.join(sorted(shared))}",
            "give NCCL links of its own, or bound storage's rate: a checkpoint else stalls every "
            "all-reduce",
        )
    yield from _assess_nccl(named, environ)


def _assess_plane(plane: str, interfaces: list[Interface]) -> Seen:
    names = ", ".join(each.name for each in interfaces)
    if down := [each.name for each in interfaces if not each.up]:
        return problem(f"{plane}: {', '.join(down)} is down", f"ip link set {down[0]} up; cable")
    least, most = CLASSES[plane]
    if any(each.speed is None for each in interfaces):
        saw = f"{plane} ({names}): the driver tells no rate; its class is {least:g}-{most:g} GiB/s"
        return warning(saw, "measure it: iperf3 or ib_write_bw between two nodes")
    rate = sum(each.speed or 0.0 for each in interfaces) / _GIB
    saw = f"{plane} ({names}): links of {rate:.3g} GiB/s, its class is {least:g}-{most:g}"
    if rate < least:
        return warning(saw, "more or faster links; ethtool shows a rate agreed too low")
    return ok(saw)


def _assess_nccl(named: Mapping[str, list[str]], environ: Mapping[str, str]) -> Iterator[Seen]:
    """NCCL picks an interface by itself where nobody tells it."""
    told = environ.get("NCCL_SOCKET_IFNAME", "")
    names = named.get("gpu", [])
    if names and not any(_matches(told, name) for name in names):
        yield warning(
            f"NCCL_SOCKET_IFNAME is {told or 'not set'}, and the GPU plane is {', '.join(names)}",
            f"export NCCL_SOCKET_IFNAME=={','.join(names)} (the first = is of the exact name)",
        )


def _matches(told: str, name: str) -> bool:
    """As NCCL reads it: prefixes, exact after =, all others after ^."""
    exact, kept = told.removeprefix("^").startswith("="), not told.startswith("^")
    words = [word for word in told.removeprefix("^").removeprefix("=").split(",") if word]
    found = any(name == word if exact else name.startswith(word) for word in words)
    return bool(words) and found == kept


def _roots_of(
    plane: str, named: Mapping[str, list[str]], found: Mapping[str, Interface | None]
) -> set[str]:
    return {root for name in named.get(plane, []) if (each := found[name]) for root in each.roots}
