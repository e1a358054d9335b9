"""The driver on the host against the CUDA that torch was built with.

A driver runs what was built with any older CUDA. It runs a newer one of the same major version
("minor version compatibility"), and with NVIDIA's package cuda-compat a newer major one on GPUs of
data centres ("forward compatibility"). Source: NVIDIA, CUDA Compatibility,
docs.nvidia.com/deploy/cuda-compatibility, table 1 (minor versions) and "Forward Compatibility".
"""

import runpy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from pipelines.doctor.findings import NotHereError, Seen, ok, problem, warning
from pipelines.doctor.nvidia_smi import Smi, ask_driver
from pipelines.doctor.tools import in_container

Version = tuple[int, ...]

# The first driver of each major version of CUDA, by table 1.
LEAST_DRIVER: dict[int, Version] = {11: (450, 80, 2), 12: (525,), 13: (580,)}
# What CUDA 13 builds no code for; announced in the release notes of CUDA 12.9, "Deprecated
# Architectures", which pytorch/pytorch#157517 quotes.
_LAST_CUDA = {"Maxwell": 12, "Pascal": 12, "Volta": 12}
_NO_FORWARD = ("GeForce", "Titan")  # table "Forward Compatibility": data-centre GPUs, some RTX
_UVM = Path("/dev/nvidia-uvm")  # without it CUDA can't start, and nvidia-smi can


def driver_and_cuda() -> Iterator[Seen]:
    """Yield whether torch can use the GPUs of this machine."""
    machine = ask_driver()
    yield from assess_container_devices(in_container(), _UVM.exists())
    built_with, version = torch_build()
    yield assess_driver(machine, built_with, version)


def assess_container_devices(inside: bool, uvm: bool) -> Iterator[Seen]:
    """Check for CUDA's device file; on a host, the first program that uses CUDA makes it."""
    if inside and not uvm:
        fix = (
            "start the container by the toolkit (--gpus all), or with --device /dev/nvidia-uvm "
            "after nvidia-modprobe -u -c 0 on the host"
        )
        yield problem("no /dev/nvidia-uvm in this container: CUDA can't start", fix)


def torch_build() -> tuple[str | None, str]:
    """Return the CUDA of the torch that is installed, None without one, and torch's version.

    Read from the file that torch keeps it in, as importing torch takes seconds.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotHereError("torch is not installed")
    values = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return values["cuda"], values["__version__"]


def assess_driver(machine: Smi, built_with: str | None, version: str) -> Seen:
    """Assess by NVIDIA's rules whether driver and torch's CUDA go together."""
    names = f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) != 1)}"
    if built_with is None:
        fix = "install torch with CUDA: pytorch.org/get-started names the index for each version"
        return problem(f"torch {version} has no CUDA, and this machine has {names}", fix)
    saw = f"driver {machine.driver} knows CUDA {machine.cuda}, torch {version} is of {built_with}"
    wanted, driver = _version(built_with), _version(machine.driver)
    for architecture in sorted({gpu.architecture for gpu in machine.gpus}):
        if wanted[0] > _LAST_CUDA.get(architecture, wanted[0]):
            fix = f"install a torch of CUDA {_LAST_CUDA[architecture]}, or use newer GPUs"
            return problem(f"{saw}, which has no code for {architecture}", fix)
    if not machine.cuda:
        fix = "NVIDIA_DRIVER_CAPABILITIES=compute,utility for the container; on a host ldconfig"
        saw = f"driver {machine.driver} finds no CUDA: libcuda.so.1 is not here"
        return problem(saw, fix)
    least = LEAST_DRIVER.get(wanted[0])
    if least is None:
        return warning(f"{saw}, a CUDA that this table does not know", "see CUDA's release notes")
    if _version(machine.cuda) >= wanted[:2]:
        forward = driver < least
        return _forward(machine, saw) if forward else ok(saw)
    if driver >= least:
        return warning(
            f"{saw}: minor version compatibility, under which code that compiles PTX fails",
            "update the driver to one that came with that CUDA or later",
        )
    return problem(f"{saw}, which needs driver {_dotted(least)} or newer", _fix(machine, wanted))


def _forward(machine: Smi, saw: str) -> Seen:
    """Return the driver is older than what the library beside it, of cuda-compat, can do."""
    if refused := sorted({gpu.brand for gpu in machine.gpus} & set(_NO_FORWARD)):
        fix = "update the driver, or take /usr/local/cuda/compat out of LD_LIBRARY_PATH"
        return problem(f"{saw} by cuda-compat, which {refused[0]} refuses (CUDA error 804)", fix)
    return ok(f"{saw} by cuda-compat: forward compatibility")


def _fix(machine: Smi, wanted: Version) -> str:
    update = "update the driver"
    if any(gpu.brand in _NO_FORWARD for gpu in machine.gpus):
        return f"{update}, or install a torch of CUDA {machine.cuda} or older"
    package = "-".join(map(str, wanted[:2]))
    return (
        f"{update}, or put cuda-compat-{package} into the image and its libraries first in "
        f"LD_LIBRARY_PATH, or install a torch of CUDA {machine.cuda} or older"
    )


def _version(text: str) -> Version:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
