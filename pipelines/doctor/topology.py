"""How GPUs reach each other and the network: `nvidia-smi topo -m` and `nvidia-smi nvlink -s`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipelines.doctor.findings import NotHereError, Seen, ok, problem, warning
from pipelines.doctor.nvidia_smi import smi
from pipelines.doctor.tools import output_of, read

_STYLE = re.compile(r"\x1b\[[0-9;]*m")  # drivers underline the header, also into a pipe
_COLUMN_END = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_FAR = ("NODE", "SYS")  # past a host bridge, where GPUs and network cards are not direct peers
_LINK = re.compile(r"\s*Link (\d+): (.+)")


@dataclass(frozen=True)
class Topology:
    """The matrix.

    Attributes:
        links: By the two ends, as NVIDIA calls them: `NV12`, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`.
        gpus: `GPU0`, …
        nics: By the name of the device, such as `mlx5_0`.
    """

    links: dict[tuple[str, str], str]
    gpus: tuple[str, ...]
    nics: tuple[str, ...]


def topology() -> Iterator[Seen]:
    """Check the links between GPUs, and from each GPU to its nearest network card."""
    smi()  # which says it better where there is no driver
    text = output_of("nvidia-smi", "topo", "-m")
    yield from assess_topology(read(parse_topology, text, "nvidia-smi topo -m"))


def parse_topology(text: str) -> Topology:
    """Return the matrix, with network cards by their own names where there is a legend of them.

    Raises:
        ValueError: it is no matrix, or one with holes.
    """
    text = _STYLE.sub("", text)
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if "GPU0" in line), None)
    if first is None:
        raise ValueError("no GPU0 in it")
    names = [name.strip() for name in lines[first].split("\t")]
    names = [name for name in names if name and name not in _COLUMN_END]
    legend = dict(re.findall(r"^\s*(NIC\d+): (\S+)", text, re.MULTILINE))
    links = {}
    for line in lines[first + 1 :]:
        name, *cells = (cell.strip() for cell in line.split("\t"))
        if name not in names:
            break
        for other, link in zip(names, cells, strict=False):
            links[legend.get(name, name), legend.get(other, other)] = link
    if len(links) < len(names) ** 2 or not all(links.values()):
        raise ValueError("its matrix has holes")
    gpus = tuple(name for name in names if re.fullmatch(r"GPU\d+", name))
    nics = tuple(legend.get(name, name) for name in names if name not in gpus)
    return Topology(links, gpus, nics)


def assess_topology(found: Topology) -> Iterator[Seen]:
    """Yield what is slow by the way it is built is no fault, but is told; a far network card is
    one.
    """
    if len(found.gpus) > 1:
        yield ok(_between_gpus(found))
    far = [gpu for gpu in found.gpus if found.nics and not _near(found, gpu)]
    if far:
        yield warning(
            f"no network card is near {', '.join(far)}: the nearest is past a host bridge",
            "move cards to slots of the GPUs' own PCIe switches or CPU; NCCL else copies through "
            "the host's memory",
        )
    elif found.nics:
        yield ok(f"each GPU has a network card near it, of {', '.join(found.nics)}")
    if len(found.gpus) < 2 and not found.nics:
        yield ok("one GPU and no RDMA card: nothing to join")


def _between_gpus(found: Topology) -> str:
    pairs = [(one, two) for one in found.gpus for two in found.gpus if one < two]
    kinds = {found.links[pair] for pair in pairs}
    if all(kind.startswith("NV") for kind in kinds):
        return f"{len(found.gpus)} GPUs, every two joined by {' or '.join(sorted(kinds))}"
    direct = [pair for pair in pairs if found.links[pair].startswith("NV")]
    rest = "/".join(sorted(kind for kind in kinds if not kind.startswith("NV")))
    if direct:
        return (
            f"{len(direct)} of {len(pairs)} pairs of GPUs are joined by NVLink, the others by "
            f"{rest}: keep tensor parallelism among the former"
        )
    return f"{len(found.gpus)} GPUs joined by PCIe ({rest}), not NVLink: avoid tensor parallelism"


def _near(found: Topology, gpu: str) -> bool:
    return any(found.links[gpu, nic] not in _FAR for nic in found.nics)


def nvlink() -> Iterator[Seen]:
    """Yield every link by itself."""
    smi()
    text = output_of("nvidia-smi", "nvlink", "-s")
    yield assess_nvlink(read(parse_nvlink, text, "nvidia-smi nvlink -s"))


def parse_nvlink(text: str) -> dict[str, list[str]]:
    """Return each GPU's links: their rates, or `<inactive>`.

    Raises:
        ValueError: a link comes before any GPU.
    """
    links: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("GPU "):
            links[line.partition(":")[0]] = []
        elif found := _LINK.match(line):
            if not links:
                raise ValueError("a link of no GPU")
            links[next(reversed(links))].append(found[2].strip())
    return links


def assess_nvlink(links: dict[str, list[str]]) -> Seen:
    """Return a GPU without any has no bridge, by design; one with some has lost the others."""
    linked = {gpu: rates for gpu, rates in links.items() if set(rates) - {"<inactive>"}}
    if not linked:
        raise NotHereError("no NVLink between these GPUs")
    lost = {gpu: rates.count("<inactive>") for gpu, rates in linked.items()}
    bad = [f"{count} of {len(linked[gpu])} on {gpu}" for gpu, count in lost.items() if count]
    if bad and len(linked) > 1 and len(set(lost.values())) == 1:
        return warning(
            f"the same number of NVLinks is down on every GPU: {', '.join(bad)}",
            "on cards in slots, bridges that nobody fitted: by design; on a board with NVSwitch, a "
            "switch that is down: dmesg | grep -i sxid, restart the fabric manager",
        )
    if bad:
        return problem(
            f"NVLinks are down: {', '.join(bad)}",
            "nvidia-smi nvlink -e shows errors; reseat bridge or board, restart the fabric "
            "manager, reset the GPUs; a link that stays down is a repair",
        )
    most = max(len(rates) for rates in linked.values())
    if few := [gpu for gpu in linked if len(linked[gpu]) < most]:
        fix = "nvidia-smi nvlink -s; links that are not even listed were not trained: reboot"
        return problem(f"{', '.join(few)} has fewer NVLinks than others' {most}", fix)
    rate = next(iter(linked.values()))[0]
    return ok(f"{len(linked)} GPUs with {most} NVLinks each of {rate}")
