"""GPUDirect Storage: from the drive into device memory, past the processor's memory.

cuFile, NVIDIA's library for it, also works where that can't be: it then copies through host memory
and says nothing ("compatibility mode"). Here that is disallowed, so that a read which succeeds
proves the direct path; where it can't be had, `why_not` says why.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.loading.readers import Ranges, ThreadedReader, Wait, short_read

DRIVER = Path("/proc/driver/nvidia-fs")
CONFIG = Path("/etc/cufile.json")
_CONFIG_VARIABLE = "CUFILE_ENV_PATH_JSON"
_ALLOW = "CUFILE_ALLOW_COMPAT_MODE"
_FORCE = "CUFILE_FORCE_COMPAT_MODE"
_THREADS = 8

Load = Callable[[int, Tensor], None]  # fills a tensor with the bytes at an offset


class GdsReader(ThreadedReader):
    """Reads straight into device memory; make one only where `why_not` returned None."""

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        super().__init__(_THREADS)
        self._device = device
        self._paths = list(paths)
        opened, library = _library()
        self._load = [opened(path) for path in paths]
        self.name = f"gds (direct, by {library})"

    def read(self, ranges: Ranges, out: Tensor) -> Wait:
        """See `Reader`."""
        # cuFile knows no streams: `out` may be memory that the current one still has work for.
        torch.cuda.current_stream(self._device).synchronize()
        return super().read(ranges, out)

    def fill(self, file: int, offset: int, out: Tensor) -> None:
        """See `ThreadedReader`."""
        with torch.cuda.device(self._device):
            self._load[file](offset, out)
        # PyTorch takes a short read for a whole one.
        if (size := self._paths[file].stat().st_size) < offset + len(out):
            raise short_read(self._paths[file], offset, len(out), max(0, size - offset))


def why_not(
    path: Path,
    device: torch.device,
    driver: Path = DRIVER,
    environ: Mapping[str, str] = os.environ,
    try_read: Callable[[Path, torch.device], None] | None = None,
) -> str | None:
    """Why a file can't be read into a device directly; None where it can.

    Args:
        path: Any file on the filesystem in question.
        device: Where its bytes are wanted.
        driver: Where the kernel's driver shows itself.
        environ: cuFile's variables, and where its configuration is.
        try_read: Reads a page of the file by cuFile, or raises.
    """
    if device.type != "cuda":
        return "there is no CUDA device"
    properties = _properties(environ)
    peer_to_peer = properties.get("use_pci_p2pdma") is True  # the kernel's own way, without driver
    if not driver.is_dir() and not peer_to_peer:
        return "compatibility mode: the kernel driver nvidia-fs isn't loaded"
    if _true(environ.get(_FORCE)) or properties.get("force_compat_mode") is True:
        return "compatibility mode: it is forced by cuFile's configuration"
    if _true(environ.get(_ALLOW)):
        return f"compatibility mode: {_ALLOW} is set, so that a read would prove nothing"
    os.environ[_ALLOW] = "false"  # read when the library is first used
    try:
        (try_read or _read_a_page)(path, device)
    except (RuntimeError, OSError, UserError) as error:
        return f"cuFile can't read {path} directly: {str(error).splitlines()[0]}"
    return None


def _read_a_page(path: Path, device: torch.device) -> None:
    size = min(4096, path.stat().st_size)
    GdsReader([path], device).fill(0, 0, torch.empty(size, dtype=torch.uint8, device=device))


def _properties(environ: Mapping[str, str]) -> dict[str, Any]:
    path = Path(environ.get(_CONFIG_VARIABLE, CONFIG))
    if not path.is_file():
        return {}
    # NVIDIA's own file has comments, which JSON lacks.
    lines = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("//"))
    try:
        properties: dict[str, Any] = json.loads(text).get("properties", {})
    except ValueError as error:
        raise UserError(f"{path}: cuFile's configuration is not valid JSON: {error}") from error
    return properties


def _true(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on")


def _library() -> tuple[Callable[[Path], Load], str]:
    """KvikIO where it is installed, for it reads without the interpreter's lock."""
    return (_by_kvikio, "KvikIO") if find_spec("kvikio") else (_by_torch, "torch.cuda.gds")


def _by_torch(path: Path) -> Load:
    file = torch.cuda.gds.GdsFile(str(path), os.O_RDONLY)

    def load(offset: int, out: Tensor) -> None:
        start = out.storage_offset()  # in bytes: they are uint8
        file.load_storage(out.untyped_storage()[start : start + len(out)], offset)

    return load


def _by_kvikio(path: Path) -> Load:
    import kvikio

    file = kvikio.CuFile(path, "r")

    def load(offset: int, out: Tensor) -> None:
        found = file.pread(out, len(out), offset).get()
        if found != len(out):
            raise short_read(path, offset, len(out), found)

    return load
