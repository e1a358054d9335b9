"""NVIDIA's container toolkit, which puts the host's driver into containers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipelines.doctor.findings import FaultError, NotHereError, Seen, ok, problem, warning
from pipelines.doctor.nvidia_smi import fix_of, smi
from pipelines.doctor.tools import in_container, output_of, read

_CDI = re.compile(r"^nvidia\.com/gpu=(?!all$)\S+$", re.MULTILINE)
_INSTALL = "install nvidia-container-toolkit, then nvidia-ctk runtime configure"


def container_toolkit() -> Iterator[Seen]:
    """Yield whether containers on this host can be given its GPUs."""
    if in_container():
        raise NotHereError("this is a container itself; the toolkit is the host's")
    driver = smi().driver
    try:
        text = output_of("nvidia-container-cli", "info")
    except NotHereError:
        yield _without_its_tool()
        return
    except FaultError as error:
        raise FaultError(str(error), fix_of(str(error), error.fix)) from None
    yield assess_container_toolkit(read(parse_toolkit, text, "nvidia-container-cli info"), driver)


def _without_its_tool() -> Seen:
    """Return the toolkit's base package has only nvidia-ctk, for runtimes that read CDI's files."""
    try:
        return assess_cdi(parse_cdi(output_of("nvidia-ctk", "cdi", "list")))
    except NotHereError:
        saw = "neither nvidia-container-cli nor nvidia-ctk: containers get no GPUs here"
        return warning(saw, _INSTALL)


@dataclass(frozen=True)
class Toolkit:
    """What the toolkit would put into a container."""

    driver: str
    gpus: int


def parse_toolkit(text: str) -> Toolkit:
    """Read what `nvidia-container-cli info` prints.

    Raises:
        ValueError: it names no driver.
    """
    found = re.search(r"^NVRM version:\s+(\S+)", text, re.MULTILINE)
    if found is None:
        raise ValueError("no NVRM version in it")
    return Toolkit(found[1], len(re.findall(r"^Device Index:", text, re.MULTILINE)))


def assess_container_toolkit(found: Toolkit, driver: str) -> Seen:
    """Check that the toolkit finds the driver that runs."""
    if found.driver != driver:
        fix = "remove the other driver's libraries, or reboot after an update"
        return problem(f"the toolkit finds driver {found.driver}, nvidia-smi {driver}", fix)
    return ok(f"containers get driver {driver} and {found.gpus} GPU{'s' * (found.gpus != 1)}")


def parse_cdi(text: str) -> list[str]:
    """Return GPUs in `nvidia-ctk cdi list`, without the one that stands for all."""
    return _CDI.findall(text)


def assess_cdi(gpus: list[str]) -> Seen:
    """Podman, containerd and newer Docker find GPUs by these names."""
    if not gpus:
        fix = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, and after each new driver"
        return warning("nvidia-ctk knows no GPU: containers get none", fix)
    return ok(f"containers get {len(gpus)} GPU{'s' * (len(gpus) != 1)} by CDI: {gpus[0]} …")
