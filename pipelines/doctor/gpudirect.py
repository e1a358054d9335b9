"""GPUDirect: network cards and drives that read and write a GPU's memory themselves.

RDMA needs nvidia-peermem, or a kernel and an open NVIDIA driver that share buffers by dma-buf.
Storage needs the module nvidia-fs and its device nodes, cuFile's configuration, the right to lock
memory, and a file system that it knows (NVIDIA, GPUDirect Storage Installation and Troubleshooting
Guide). Where a piece is missing cuFile copies through the host and says nothing.
"""

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.doctor import torch_probe
from pipelines.doctor.findings import NotHereError, Seen, ok, warning
from pipelines.doctor.host import Mount, data_mount, may_lock_all
from pipelines.doctor.network import DEVICES as RDMA_DEVICES
from pipelines.doctor.nvidia_smi import smi
from pipelines.doctor.tools import output_of, read, text_of

_PEERMEM = {"nvidia_peermem", "nv_peer_mem"}
_DMA_BUF = (5, 12)  # the first kernel whose RDMA shares buffers so (NCCL 2.13's release notes)
_GDS_TOOLS = ("/usr/local/cuda/gds/tools",)
# A file system's name in the kernel, and its row in gdscheck's table. Local ones go by the drive.
_ROWS = {
    "ext4": "NVMe",
    "xfs": "NVMe",
    "lustre": "DDN EXAScaler",
    "nfs": "NFS",
    "nfs4": "NFS",
    "beegfs": "BeeGFS",
    "wekafs": "WekaFS",
    "gpfs": "IBM Spectrum Scale",
    "virtiofs": "VIRTIOFS",
}
_DIRECT = ("Supported", "nvfs", "p2pdma", "dmabuf", "nvidia_peermem")


def rdma() -> Iterator[Seen]:
    """Check GPUDirect RDMA, between GPUs and network cards."""
    smi()
    if not any(RDMA_DEVICES.glob("*")):
        raise NotHereError("no RDMA device")
    modules = parse_modules(_modules())
    driver = text_of(Path("/proc/driver/nvidia/version")) or ""
    yield assess_rdma(modules, driver, platform.release())


def _modules() -> str:
    """Nothing, of a kernel that was built without loadable ones."""
    return text_of(Path("/proc/modules")) or ""


def parse_modules(text: str) -> set[str]:
    """Return names in /proc/modules, which lsmod prints."""
    return {line.split()[0] for line in text.splitlines() if line.strip()}


def assess_rdma(modules: set[str], driver: str, kernel: str) -> Seen:
    """Assess GPUDirect RDMA, which works by a kernel module or by dma-buf."""
    if loaded := sorted(modules & _PEERMEM):
        return ok(f"GPUDirect RDMA by {loaded[0]}")
    version = tuple(int(part) for part in re.findall(r"\d+", kernel)[:2])
    if "Open Kernel Module" in driver and version >= _DMA_BUF:
        return ok(f"GPUDirect RDMA by dma-buf: open driver, kernel {kernel}")
    return warning(
        "no GPUDirect RDMA: neither nvidia-peermem nor an open driver with dma-buf",
        "modprobe nvidia-peermem, and name it in /etc/modules-load.d; NCCL else copies through "
        "the host's memory",
    )


@dataclass(frozen=True)
class Storage:
    """The pieces of GPUDirect Storage.

    Attributes:
        module: Whether nvidia-fs is loaded.
        devices: Its nodes in /dev.
        config: Of cuFile; None where there is none.
        may_lock: Whether the process may lock memory without limit.
        mount: Of the data.
        modes: gdscheck's, by its name of a file system or drive; None without gdscheck.
        why_not: What a read that may not fall back said; None where it went direct.
    """

    module: bool
    devices: Sequence[str]
    config: str | None
    may_lock: bool
    mount: Mount
    modes: Mapping[str, str] | None
    why_not: str | None


def storage() -> Iterator[Seen]:
    """Check GPUDirect Storage, from drives to GPUs."""
    smi()
    config = os.environ.get("CUFILE_ENV_PATH_JSON", "/etc/cufile.json")
    try:
        modes = read(parse_gdscheck, output_of("gdscheck", "-p", folders=_GDS_TOOLS), "gdscheck -p")
    except NotHereError:
        modes = None
    yield from assess_storage(
        Storage(
            module="nvidia_fs" in parse_modules(_modules()),
            devices=sorted(path.name for path in Path("/dev").glob("nvidia-fs*")),
            config=config if Path(config).is_file() else None,
            may_lock=may_lock_all(),
            mount=data_mount(),
            modes=modes,
            why_not=torch_probe.facts().gds,
        )
    )


def parse_gdscheck(text: str) -> dict[str, str]:
    """Return the rows of the driver's configuration: `NVMe` and how it is read.

    Raises:
        ValueError: it has none.
    """
    part = text.partition("DRIVER CONFIGURATION:")[2].partition("CUFILE CONFIGURATION:")[0]
    rows = re.findall(r"^\s*(-{0,2}[\w ]+?)\s*: (.+?)\s*$", part, re.MULTILINE)
    if not rows:
        raise ValueError("no DRIVER CONFIGURATION in it")
    return {name.lstrip("-"): value for name, value in rows}


def assess_storage(found: Storage) -> Iterator[Seen]:
    """Yield the mode in effect, and where it is not direct each missing piece."""
    if found.why_not is None:  # newer kernels need neither nvidia-fs nor its devices for that
        yield ok(f"mode in effect under {found.mount.point}: direct, proven by a read")
        return
    yield from _missing(found)
    kind = found.mount.kind
    if found.modes is not None and kind in _ROWS:
        said = found.modes.get(_ROWS[kind], "not in its list")
        if not any(mode in said for mode in _DIRECT) or said == "Unsupported":
            yield warning(f"gdscheck on {kind} ({_ROWS[kind]}): {said}", _filesystem_fix())
    elif kind not in _ROWS:
        yield warning(f"GPUDirect Storage does not know {kind}", _filesystem_fix())
    yield warning(
        f"mode in effect under {found.mount.point}: pinned buffers; {found.why_not}",
        "fix what is named above, or set the recipe's data.reader to pinned and be content",
    )


def _missing(found: Storage) -> Iterator[Seen]:
    if not found.module:
        fix = "install nvidia-gds on the host, modprobe nvidia-fs"
        yield warning("the kernel module nvidia-fs is not loaded", fix)
    elif not found.devices:
        fix = "mount the host's /dev/nvidia-fs* into the container, as infra's GPU pod does"
        yield warning("no /dev/nvidia-fs* here, though the module is loaded", fix)
    if found.config is None:
        fix = "mount a cufile.json, and name it in CUFILE_ENV_PATH_JSON where it lies elsewhere"
        yield warning("no cufile.json", fix)
    if not found.may_lock:
        fix = "capability IPC_LOCK and memlock=-1 for the container; ulimit -l unlimited"
        yield warning("memory may not be locked", fix)


def _filesystem_fix() -> str:
    return (
        "put the data on ext4 (data=ordered) or xfs on NVMe, or a parallel file system that "
        "NVIDIA lists, and point PENSTOCK_HOME there"
    )
