"""PCI devices as the kernel lists them, with or without a driver."""

from pathlib import Path

from pipelines.doctor.tools import text_of

_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # VGA and 3D controllers


def nvidia_devices(root: Path = _DEVICES) -> list[str]:
    """The addresses of NVIDIA's GPUs."""
    return sorted(
        device.name
        for device in root.glob("*")
        if text_of(device / "vendor") == _NVIDIA
        and (text_of(device / "class") or "").startswith(_DISPLAY)
    )
