"""`nvidia-smi -q -x`: what the driver says of itself and of every GPU."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from pipelines.doctor.findings import FaultError, NotHereError
from pipelines.doctor.pci import nvidia_devices
from pipelines.doctor.tools import once, output_of

_EMPTY = {"", "N/A", "[N/A]", "Requested functionality has been deprecated"}
_NO_DRIVER = (
    "install the NVIDIA driver on the host; in a container ask for GPUs (--gpus all, "
    "nvidia.com/gpu)"
)
_MISMATCH = (
    "the driver was updated while its kernel module is loaded: reboot, or unload every nvidia "
    "module and load it again"
)


@dataclass(frozen=True)
class Gpu:
    """One GPU; what it does not say is None.

    Attributes:
        number: As CUDA counts them by PCI address.
        recovery: What the driver asks for: `None`, `Reset`, `Reboot`, …
        uncorrectable: Memory errors that ECC could not correct, by counter, since the last reset.
        events: Why clocks are lower than they could be: `hw_thermal_slowdown`, `gpu_idle`, …
    """

    number: int
    name: str
    brand: str
    architecture: str
    mig: str | None
    recovery: str | None
    link_generation: tuple[int, int] | None  # now, at most
    link_width: tuple[int, int] | None
    events: frozenset[str]
    ecc: tuple[str, str] | None  # now, after a reboot
    uncorrectable: dict[str, int]
    rows_pending: bool
    rows_failed: bool
    compute_mode: str | None
    fabric: tuple[str, str | None] | None  # state, status


@dataclass(frozen=True)
class Smi:
    """The machine."""

    driver: str
    cuda: str  # the newest that the driver's library knows
    gpus: tuple[Gpu, ...]


def smi() -> Smi:
    """The machine, for checks that leave a driver that fails to the one of driver and CUDA.

    Raises:
        NotHereError: there is no GPU, or no driver that answers.
    """
    try:
        return ask_driver()
    except FaultError:
        raise NotHereError("the driver does not answer: see driver and CUDA") from None


@once
def ask_driver() -> Smi:
    """What the driver says.

    Raises:
        NotHereError: there is neither a driver nor a GPU.
        FaultError: there is one without the other, or the driver fails.
    """
    devices = nvidia_devices()
    try:
        return parse_smi(output_of("nvidia-smi", "-q", "-x"))
    except NotHereError:
        if devices:
            saw = f"{len(devices)} NVIDIA GPUs ({devices[0]} …) and no nvidia-smi: no driver"
            raise FaultError(saw, _NO_DRIVER) from None
        raise NotHereError("no NVIDIA GPU") from None
    except FaultError as error:
        if not devices and "couldn't communicate" in str(error):
            raise NotHereError("no NVIDIA GPU; its tools are installed") from None
        raise FaultError(str(error), mend_of(str(error), error.mend)) from None


def mend_of(words: str, otherwise: str) -> str:
    """The mend for what nvidia-smi, or another user of its library, says when it fails."""
    if "version mismatch" in words.lower():
        return _MISMATCH
    return _NO_DRIVER if "couldn't communicate" in words else otherwise


def parse_smi(text: str) -> Smi:
    """Of the XML of schema versions 11 to 13."""
    root = ElementTree.fromstring(text)  # noqa: S314 (the driver's own tool wrote it)
    gpus = tuple(_gpu(number, element) for number, element in enumerate(root.iter("gpu")))
    return Smi(_text(root, "driver_version") or "", _text(root, "cuda_version") or "", gpus)


def _gpu(number: int, gpu: Element) -> Gpu:
    link = "pci/pci_gpu_link_info"
    state = _text(gpu, "fabric/state")
    now, later = _text(gpu, "ecc_mode/current_ecc"), _text(gpu, "ecc_mode/pending_ecc")
    reset = _text(gpu, "gpu_reset_status/reset_required") == "Yes"
    return Gpu(
        number=number,
        name=_text(gpu, "product_name") or "",
        brand=_text(gpu, "product_brand") or "",
        architecture=_text(gpu, "product_architecture") or "",
        mig=_text(gpu, "mig_mode/current_mig"),
        recovery="Reset" if reset else _text(gpu, "gpu_recovery_action"),
        link_generation=_pair(gpu, f"{link}/pcie_gen/{{}}_link_gen"),
        link_width=_pair(gpu, f"{link}/link_widths/{{}}_link_width"),
        events=frozenset(_events(gpu)),
        ecc=(now, later or now) if now else None,
        uncorrectable=dict(_uncorrectable(gpu)),
        rows_pending="Yes"
        in (
            _text(gpu, "remapped_rows/remapped_row_pending"),
            _text(gpu, "retired_pages/pending_retirement"),
        ),
        rows_failed=_text(gpu, "remapped_rows/remapped_row_failure") == "Yes",
        compute_mode=_text(gpu, "compute_mode"),
        fabric=(state, _text(gpu, "fabric/status")) if state else None,
    )


def _events(gpu: Element) -> Iterator[str]:
    """Older drivers call them throttle reasons."""
    for parent in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for reason in gpu.iterfind(f"{parent}/*"):
            if (reason.text or "").strip() == "Active":
                yield re.sub(r"^clocks_(event|throttle)_reason_", "", reason.tag)


def _uncorrectable(gpu: Element) -> Iterator[tuple[str, int]]:
    for counter in gpu.iterfind("ecc_errors/volatile/*"):
        value = (counter.text or "").strip()
        if "uncorrectable" in counter.tag and value.isdigit():
            yield counter.tag, int(value)


def _pair(gpu: Element, path: str) -> tuple[int, int] | None:
    now, most = (_text(gpu, path.format(which)) for which in ("current", "max"))
    return (int(now.rstrip("x")), int(most.rstrip("x"))) if now and most else None


def _text(element: Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return None if text in _EMPTY else text
