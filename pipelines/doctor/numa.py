"""NUMA: which memory is near which cores, by the kernel's own tables."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.doctor.findings import NotHereError, Seen, ok, warning
from pipelines.doctor.tools import read, text_of

_NODES = Path("/sys/devices/system/node")
_UNEVEN = 0.75  # of the largest node's memory: less is a missing module, not a reserved part
_GIB = 1 << 30


@dataclass(frozen=True)
class Node:
    """Cores, and bytes of memory."""

    number: int
    cores: frozenset[int]
    memory: int


def numa() -> Iterator[Seen]:
    """Check this machine's NUMA nodes and the cores that this process may use."""
    yield from assess_numa(read_nodes(_NODES), os.sched_getaffinity(0))


def read_nodes(root: Path) -> list[Node]:
    """Return all nodes.

    Raises:
        NotHereError: the kernel knows none.
    """
    folders = sorted(root.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    if not folders:
        raise NotHereError("the kernel knows no NUMA nodes")
    return [_node(folder) for folder in folders]


def _node(folder: Path) -> Node:
    found = re.search(r"MemTotal:\s+(\d+) kB", text_of(folder / "meminfo") or "")
    memory = int(found[1]) * 1024 if found else 0
    cores = read(parse_cores, text_of(folder / "cpulist") or "", str(folder / "cpulist"))
    return Node(int(folder.name[4:]), cores, memory)


def parse_cores(text: str) -> frozenset[int]:
    """`0-3,8` as the kernel writes it.

    Raises:
        ValueError: it is no such list.
    """
    if re.fullmatch(r"(\d{1,6}(-\d{1,6})?(,|$))*", text.strip(), re.ASCII) is None:
        raise ValueError("not a list of cores")
    ranges = (part.partition("-") for part in text.split(",") if part)
    return frozenset(
        core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)
    )


def assess_numa(nodes: Sequence[Node], mine: set[int]) -> Iterator[Seen]:
    """Nodes with cores should have like memory, and this process all of them."""
    if len(nodes) == 1:
        yield ok("one NUMA node: all memory is equally near")
        return
    with_cores = [node for node in nodes if node.cores]
    most = max(node.memory for node in with_cores)
    for node in with_cores:
        if node.memory < _UNEVEN * most:
            yield warning(
                f"NUMA node {node.number} has {node.memory / _GIB:.3g} GiB of memory, another "
                f"{most / _GIB:.3g}",
                "look for a module that the BIOS left out: dmidecode -t memory",
            )
    left_out = [node.number for node in with_cores if not node.cores & mine]
    if left_out:
        yield warning(
            f"this process may use no core of NUMA nodes {left_out}",
            "give the container whole sockets, or GPUs of its own socket only (cpuset, the "
            "topology manager of Kubernetes)",
        )
    else:
        yield ok(f"{len(with_cores)} NUMA nodes with cores, all open to this process")
