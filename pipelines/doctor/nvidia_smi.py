"""`nvidia-smi -q -x`: what the driver says of itself and of every GPU.

What NVIDIA's driver, its library and CUDA say when they fail, and the fix for it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from pipelines.doctor.findings import FaultError, NotHereError, ToolFailedError
from pipelines.doctor.tools import kernel_driver, nvidia_devices, once, output_of, read

_NO_DRIVER = (
    "install the NVIDIA driver on the host and blacklist nouveau; in a container ask for GPUs "
    "(--gpus all, nvidia.com/gpu)"
)
_OFF_THE_BUS = (
    "the GPU fell off the bus: dmesg | grep -i xid; drain the machine and power-cycle it; reseat "
    "the card, look at its power and heat, and have it replaced if it falls again"
)
_FABRIC = (
    "NVSwitch is not set up: systemctl restart nvidia-fabricmanager on the host, of the driver's "
    "very version"
)
# By words, in lower case; the first that is found counts.
_FIXES = (
    (
        "version mismatch",
        "the driver was updated while its kernel module is loaded: reboot, or unload every nvidia "
        "module and load it again",
    ),
    ("couldn't communicate", _NO_DRIVER),
    ("gpu is lost", _OFF_THE_BUS),
    ("unable to determine the device handle", _OFF_THE_BUS),
    ("fallen off the bus", _OFF_THE_BUS),
    (
        "no devices were found",
        "the driver is loaded and could start no GPU: dmesg | grep NVRM says why (power cables, "
        "firmware, a driver without this GPU, or the closed one where the open one is needed)",
    ),
    (
        "failed to initialize nvml: unknown error",
        "the container lost its devices, as after a systemctl daemon-reload on the host: start it "
        "anew, with --device for each /dev/nvidia* or the cgroupfs driver",
    ),
    (
        "inforom is corrupted",
        "drain the machine, nvidia-smi -r or reboot; where the warning stays, have it replaced",
    ),
    (
        "no kernel image is available",
        "this torch has no code for this GPU: torch.cuda.get_arch_list() names what it has; "
        "install one built for the GPU's CUDA architecture",
    ),
    ("system not yet initialized", _FABRIC),
    (
        "forward compatibility was attempted",
        "take cuda-compat out of LD_LIBRARY_PATH, or update the driver: only data-centre GPUs "
        "take it",
    ),
    (
        "driver version is insufficient",
        "update the driver, or install a torch of an older CUDA: see driver and CUDA",
    ),
    (
        "invalid device ordinal",
        "CUDA opens fewer GPUs than the driver lists: MIG, or CUDA_VISIBLE_DEVICES",
    ),
    ("out of memory", "see in nvidia-smi who holds the GPU's memory, or run it later"),
    ("no space left", "free some of the disk or of /dev/shm"),
)


def fix_of(words: str, otherwise: str) -> str:
    """Return the fix for what was said; `otherwise` where nothing here knows it."""
    said = words.lower()
    return next((fix for part, fix in _FIXES if part in said), otherwise)


_COMMAND = ("nvidia-smi", "-q", "-x")
_DOCUMENT = re.compile(r"<nvidia_smi_log.*</nvidia_smi_log>", re.DOTALL)
_PROLOGUE = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>")
_EMPTY = {"", "N/A", "Not Supported", "Requested functionality has been deprecated"}
_LOST = "GPU is lost"
_UNREAD = {_LOST, "Unknown Error", "ERR!", "Insufficient Permissions"}
# NVIDIA's criteria for a replacement, and below what a reset fixes.
_FAILED = (
    "remapped_rows/remapped_row_failure",
    "ecc_errors/unrepairable_memory",
    "ecc_errors/aggregate/sram_threshold_exceeded",
)
_PENDING = (
    "remapped_rows/remapped_row_pending",
    "retired_pages/pending_retirement",
    "retired_pages/pending_blacklist",
    "ecc_errors/channel_repair_pending",
    "ecc_errors/tpc_repair_pending",
)


@dataclass(frozen=True)
class Gpu:
    """One GPU; what it does not say is None.

    Attributes:
        number: As CUDA counts them by PCI address.
        address: On the PCI bus, as the kernel writes it: `0000:4e:00.0`.
        recovery: What the driver asks for: `None`, `Reset`, `Reboot`, …
        performance: `P0`, at work, to `P15`, idle.
        power_limit: Watts: now, by default.
        events: Why clocks are lower than they could be: `hw_thermal_slowdown`, `gpu_idle`, …
        uncorrectable: Memory errors that ECC could not correct, by counter, since the last reset.
        repair_pending: Whether memory waits for a reset that fixes it.
        worn: Whether memory can't be fixed any more.
        fabric: State and status of NVSwitch's registration, and its health.
        lost: Whether it fell off the bus.
        unread: What the driver could not read of it, by name.
    """

    number: int
    address: str
    name: str
    brand: str
    architecture: str
    mig: str | None
    persistence: str | None
    recovery: str | None
    link_generation: tuple[int, int] | None  # now, at most
    link_width: tuple[int, int] | None
    performance: str | None
    power_limit: tuple[float, float] | None
    events: frozenset[str]
    ecc: tuple[str, str] | None  # now, after a reboot
    uncorrectable: dict[str, int]
    repair_pending: bool
    worn: bool
    compute_mode: str | None
    fabric: tuple[str, str | None, str | None] | None
    lost: bool
    unread: tuple[str, ...]


@dataclass(frozen=True)
class Smi:
    """The machine.

    Attributes:
        driver: Its version.
        cuda: The newest that the driver's library knows; empty where it finds none.
        gpus: By number.
        words: What it printed beside its XML: warnings, and GPUs that it can't open.
    """

    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]
    words: str = ""


def smi() -> Smi:
    """Return the machine, for checks that leave a driver that fails to the one of driver and CUDA.

    Raises:
        NotHereError: there is no GPU, or no driver that answers.
    """
    try:
        return ask_driver()
    except FaultError:
        raise NotHereError("the driver does not answer: see driver and CUDA") from None


@once
def ask_driver() -> Smi:
    """Return what the driver says; it knows at least one GPU.

    Raises:
        NotHereError: there is neither a driver nor a GPU.
        FaultError: there is one without the other, or the driver fails.
    """
    devices = nvidia_devices()
    try:
        machine = read(parse_smi, _printed(), " ".join(_COMMAND))
    except NotHereError:
        if devices:
            saw = f"{len(devices)} NVIDIA GPUs ({devices[0]} …) and no nvidia-smi: no driver"
            saw += f"; the kernel uses {held}" if (held := kernel_driver(devices[0])) else ""
            raise FaultError(saw, fix_of("couldn't communicate", "")) from None
        raise NotHereError("no NVIDIA GPU") from None
    except FaultError as error:
        if not devices and "couldn't communicate" in str(error):
            raise NotHereError("no NVIDIA GPU; its tools are installed") from None
        raise FaultError(str(error), fix_of(str(error), error.fix)) from None
    if not machine.gpus:
        words = "No devices were found"
        raise FaultError(f"driver {machine.driver}: {words}", fix_of(words, ""))
    return machine


def _printed() -> str:
    """Its output: it ends with 14 or 15 for a broken infoROM or a lost GPU, and yet tells all."""
    try:
        return output_of(*_COMMAND)
    except ToolFailedError as error:
        if not _DOCUMENT.search(error.output):
            raise
        return error.output


def bound_gpus(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Addresses of the GPUs that the kernel's module holds, opened or not."""
    return sorted(folder.name.lower() for folder in root.glob("*:*"))


def parse_smi(text: str) -> Smi:
    """Read the XML of schema versions 10 to 13, whatever stands around it.

    Raises:
        ValueError: it is no such XML.
    """
    found = _DOCUMENT.search(text)
    if found is None:
        raise ValueError("no nvidia_smi_log in it")
    try:
        root = ElementTree.fromstring(found[0])  # noqa: S314 (the driver's own tool wrote it)
    except ElementTree.ParseError as error:
        raise ValueError(f"bad XML: {error}") from None
    around = _PROLOGUE.sub("", text[: found.start()] + text[found.end() :])
    gpus = tuple(_gpu(number, element) for number, element in enumerate(root.iter("gpu")))
    driver, cuda = (_text(root, name) or "" for name in ("driver_version", "cuda_version"))
    return Smi(driver, cuda, gpus, " ".join(around.split()))


def _gpu(number: int, gpu: Element) -> Gpu:
    link = "pci/pci_gpu_link_info"
    state = _text(gpu, "fabric/state")
    now, later = _text(gpu, "ecc_mode/current_ecc"), _text(gpu, "ecc_mode/pending_ecc")
    words = [(element.tag, (element.text or "").strip()) for element in gpu.iter()]
    return Gpu(
        number=number,
        address=gpu.get("id", "").lower()[-12:],
        name=_text(gpu, "product_name") or "",
        brand=_text(gpu, "product_brand") or "",
        architecture=_text(gpu, "product_architecture") or "",
        mig=_text(gpu, "mig_mode/current_mig"),
        persistence=_text(gpu, "persistence_mode"),
        recovery=_recovery(gpu),
        link_generation=_pair(gpu, f"{link}/pcie_gen/{{}}_link_gen"),
        link_width=_pair(gpu, f"{link}/link_widths/{{}}_link_width"),
        performance=_text(gpu, "performance_state"),
        power_limit=_power_limit(gpu),
        events=frozenset(_events(gpu)),
        ecc=(now, later or now) if now else None,
        uncorrectable=dict(_uncorrectable(gpu)),
        repair_pending=any(_text(gpu, path) == "Yes" for path in _PENDING),
        worn=any(_text(gpu, path) == "Yes" for path in _FAILED),
        compute_mode=_text(gpu, "compute_mode"),
        fabric=(state, _text(gpu, "fabric/status"), _text(gpu, "fabric/health/summary"))
        if state
        else None,
        lost=any(word == _LOST for _, word in words),
        unread=tuple(dict.fromkeys(tag for tag, word in words if _bare(word) in _UNREAD)),
    )


def _recovery(gpu: Element) -> str | None:
    """Newer drivers name the action, older ones have a flag for each."""
    for flag, action in (
        ("reset_required", "Reset"),
        ("drain_and_reset_recommended", "Drain and Reset"),
    ):
        if _text(gpu, f"gpu_reset_status/{flag}") == "Yes":
            return action
    return _text(gpu, "gpu_recovery_action")


def _events(gpu: Element) -> Iterator[str]:
    """Older drivers call them throttle reasons."""
    for parent in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for reason in gpu.iterfind(f"{parent}/*"):
            if (reason.text or "").strip() == "Active":
                yield re.sub(r"^clocks_(event|throttle)_reason_", "", reason.tag)


def _uncorrectable(gpu: Element) -> Iterator[tuple[str, int]]:
    """Count uncorrectable errors by kind of memory; before Turing, double-bit errors in total."""
    paths = ("ecc_errors/volatile/*", "ecc_errors/volatile/double_bit/total")
    for counter in (each for path in paths for each in gpu.iterfind(path)):
        name = "double_bit" if counter.tag == "total" else counter.tag
        value = (counter.text or "").strip()
        if ("uncorrectable" in name or name == "double_bit") and value.isdecimal():
            yield name, int(value)


def _power_limit(gpu: Element) -> tuple[float, float] | None:
    """Return the GPU's power limit, not its module's; older drivers name it otherwise."""
    found = [
        _number(_text(gpu, f"{parent}/{name}"))
        for parent in ("gpu_power_readings", "power_readings")
        for name in ("current_power_limit", "power_limit", "default_power_limit")
    ]
    watts = [each for each in found if each is not None]
    return (watts[0], watts[1]) if len(watts) == 2 else None


def _pair(gpu: Element, path: str) -> tuple[int, int] | None:
    now, most = (_number(_text(gpu, path.format(which))) for which in ("current", "max"))
    return (int(now), int(most)) if now and most else None


def _number(text: str | None) -> float | None:
    """Return the one at the beginning of `16x` or `500.00 W`."""
    found = re.match(r"[0-9]{1,9}(\.[0-9]+)?", text or "")
    return float(found[0]) if found else None


def _text(element: Element, path: str) -> str | None:
    text = _bare((element.findtext(path) or "").strip())
    return None if text in _EMPTY or text in _UNREAD else text


def _bare(text: str) -> str:
    """Without the brackets that some values have."""
    return text.removeprefix("[").removesuffix("]")
