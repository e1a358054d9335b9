"""PCI devices as the kernel lists them, with or without a driver."""

from pathlib import Path

from pipelines.doctor.tools import text_of

_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_OTHER_BRIDGE = "0x0680"
_DISPLAY = "0x03"  # VGA and 3D controllers


def nvidia_devices(root: Path = _DEVICES) -> list[str]:
    """The addresses of NVIDIA's GPUs."""
    return sorted(
        device.name
        for device in root.glob("*")
        if text_of(device / "vendor") == _NVIDIA
        and (text_of(device / "class") or "").startswith(_DISPLAY)
    )


def has_nvswitch(root: Path = _DEVICES) -> bool:
    """Whether a bridge of NVIDIA's is here that the host sees: of Ampere's and Hopper's boards."""
    return any(
        text_of(device / "vendor") == _NVIDIA
        and (text_of(device / "class") or "").startswith(_OTHER_BRIDGE)
        for device in root.glob("*")
    )


def kernel_driver(address: str, root: Path = _DEVICES) -> str | None:
    """The kernel's driver of a device: `nvidia`, `nouveau`, `vfio-pci`; None without one."""
    driver = root / address / "driver"
    return driver.resolve().name if driver.is_symlink() else None
