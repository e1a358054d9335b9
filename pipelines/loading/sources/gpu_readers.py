"""Readers of whole files and to a GPU, and the choice between them, by the recipe or by a probe.

`GdsReader` uses GPUDirect Storage, from the drive into device memory without the host's memory.
cuFile, NVIDIA's library for it, also works where this is impossible: it then silently copies
through host memory ("compatibility mode"). Here that is forbidden, so that a successful read proves
the direct path; where that is impossible, `why_not` says why.

`PinnedReader` reads through pinned buffers; reads, copies and the device's work overlap. Without
CUDA the same code fills tensors in memory, from buffers that aren't pinned.

`BufferedReader` reads gigabytes into the host's memory through the page cache. To copy them from a
memory map takes twice as long, as each of the map's pages costs a fault.
"""

import errno
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.loading.sources.readers import (
    PIECE,
    MmapReader,
    Ranges,
    Reader,
    ThreadedReader,
    Wait,
    short_read,
)

_log = logging.getLogger(__name__)
_ALIGN = 4096  # O_DIRECT needs offsets, sizes and addresses aligned to this
_THREADS = 8  # each has a buffer and reads at the same time, to keep a drive's queue full


class BufferedReader(ThreadedReader):
    """Reads through the page cache straight into the host's memory."""

    name = "buffered"

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(_THREADS)
        self._paths = list(paths)
        self._files = [_open(path, direct=False) for path in paths]
        weakref.finalize(self, _close, self._files)

    def fill(self, file: int, offset: int, out: Tensor) -> None:
        """See `ThreadedReader`."""
        view, found = out.numpy().data, 0
        while found < len(out):
            count = os.preadv(self._files[file], [view[found:]], offset + found)
            if not count:
                raise short_read(self._paths[file], offset, len(out), found)
            found += count


class PinnedReader(ThreadedReader):
    """Reads with O_DIRECT where the filesystem supports it, and copies on its own stream."""

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        super().__init__(_THREADS, device)
        self._paths = list(paths)
        self._direct = all(_takes_direct(path) for path in paths)
        self._files = [_open(path, self._direct) for path in paths]
        weakref.finalize(self, _close, self._files)
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._buffers = threading.local()
        kind = "pinned" if self._stream else "pinned, without CUDA unpinned"
        self.name = f"{kind} ({'O_DIRECT' if self._direct else 'buffered'})"

    def read(self, ranges: Ranges, out: Tensor) -> Wait:
        """See `Reader`."""
        if self._stream is not None:
            # `out` may be memory that the current stream still has work for.
            self._stream.wait_stream(torch.cuda.current_stream(out.device))
            out.record_stream(self._stream)
        return super().read(ranges, out)

    def fill(self, file: int, offset: int, out: Tensor) -> torch.cuda.Event | None:
        """See `ThreadedReader`."""
        buffer = self._buffer()
        skip = offset % _ALIGN if self._direct else 0
        self._read(file, offset - skip, skip + len(out), buffer.memory)
        bytes_read = buffer.memory[skip : skip + len(out)]
        if self._stream is None:
            out.copy_(bytes_read)
            return None
        with torch.cuda.stream(self._stream):
            out.copy_(bytes_read, non_blocking=True)
            buffer.copied = self._stream.record_event()
        return buffer.copied

    def _read(self, file: int, offset: int, wanted: int, memory: Tensor) -> None:
        """Fill the first `wanted` bytes of `memory`, and up to one block after them."""
        view = memory.numpy().data
        size = -(-wanted // _ALIGN) * _ALIGN if self._direct else wanted
        found = 0
        while found < wanted:
            count = os.preadv(self._files[file], [view[found:size]], offset + found)
            found += count
            if count == 0 or (self._direct and found % _ALIGN and found < wanted):  # end of file
                raise short_read(self._paths[file], offset, wanted, found)

    def _buffer(self) -> "_Buffer":
        """Return this thread's buffer when it is free to be filled again."""
        if not hasattr(self._buffers, "mine"):
            self._buffers.mine = _Buffer(pinned=self._stream is not None)
        mine: _Buffer = self._buffers.mine
        if mine.copied is not None:
            mine.copied.synchronize()
        return mine


class _Buffer:
    """Aligned memory for one piece, and the event at the end of the last copy from it."""

    def __init__(self, *, pinned: bool) -> None:
        memory = torch.empty(PIECE + 3 * _ALIGN, dtype=torch.uint8, pin_memory=pinned)
        self.memory = memory[-memory.data_ptr() % _ALIGN :]
        self.copied: torch.cuda.Event | None = None


def _takes_direct(path: Path) -> bool:
    """Return whether a read without the page cache works; some filesystems refuse only then."""
    try:
        descriptor = _open(path, direct=True)
        try:
            memory = _Buffer(pinned=False).memory
            os.preadv(descriptor, [memory.numpy().data[:_ALIGN]], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        _log.info("%s: its filesystem refuses O_DIRECT; reading through the page cache", path)
        return False
    return True


def _open(path: Path, direct: bool) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))


def _close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)


DRIVER = Path("/proc/driver/nvidia-fs")
CONFIG = Path("/etc/cufile.json")
_CONFIG_VARIABLE = "CUFILE_ENV_PATH_JSON"
_ALLOW = "CUFILE_ALLOW_COMPAT_MODE"
_FORCE = "CUFILE_FORCE_COMPAT_MODE"
# KvikIO has a compatibility mode of its own, and reads less than 1 MiB through the host.
_NEVER_THROUGH_THE_HOST = {
    _ALLOW: "false",
    "KVIKIO_COMPAT_MODE": "OFF",
    "KVIKIO_GDS_THRESHOLD": "0",
}

Load = Callable[[int, Tensor], None]  # fills a tensor with the bytes at an offset


class GdsReader(ThreadedReader):
    """Reads straight into device memory; make one only if `why_not` returned None."""

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        super().__init__(_THREADS, device)
        self._device = device
        self._paths = list(paths)
        opened, library = _library()
        self._load = [opened(path) for path in paths]
        self.name = f"gds (direct, by {library})"

    def read(self, ranges: Ranges, out: Tensor) -> Wait:
        """See `Reader`."""
        # cuFile ignores streams: the current one may still have work for the memory of `out`.
        torch.cuda.current_stream(self._device).synchronize()
        return super().read(ranges, out)

    def fill(self, file: int, offset: int, out: Tensor) -> None:
        """See `ThreadedReader`."""
        with torch.cuda.device(self._device):
            self._load[file](offset, out)
        # PyTorch does not notice a short read.
        if (size := self._paths[file].stat().st_size) < offset + len(out):
            raise short_read(self._paths[file], offset, len(out), max(0, size - offset))


def why_not(
    path: Path,
    device: torch.device,
    driver: Path = DRIVER,
    environ: Mapping[str, str] = os.environ,
    try_read: Callable[[Path, torch.device], None] | None = None,
) -> str | None:
    """Return why a file can't be read into a device directly, or None if it can.

    Args:
        path: Any file on the filesystem to check.
        device: The device that needs the file's bytes.
        driver: The folder that exists if the kernel driver is loaded.
        environ: Has cuFile's variables and the path of its configuration.
        try_read: Reads a page of the file by cuFile, or raises.
    """
    if device.type != "cuda":
        return "there is no CUDA device"
    properties = _properties(environ)
    peer_to_peer = properties.get("use_pci_p2pdma") is True  # the kernel's own, without nvidia-fs
    if not driver.is_dir() and not peer_to_peer:
        return "compatibility mode: the kernel driver nvidia-fs isn't loaded"
    if _true(environ.get(_FORCE)) or properties.get("force_compat_mode") is True:
        return "compatibility mode: it is forced by cuFile's configuration"
    if _true(environ.get(_ALLOW)):
        return f"compatibility mode: {_ALLOW} is set, so that a read would prove nothing"
    os.environ.update(_NEVER_THROUGH_THE_HOST)  # read when the libraries are first used
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
    # NVIDIA's own file has comments, which JSON does not allow.
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
    """Return KvikIO if it is installed, as it reads without the interpreter's lock."""
    return (_by_kvikio, "KvikIO") if find_spec("kvikio") else (_by_torch, "torch.cuda.gds")


def _by_torch(path: Path) -> Load:
    file = torch.cuda.gds.GdsFile(str(path), os.O_RDONLY)

    def load(offset: int, out: Tensor) -> None:
        start = out.storage_offset()  # in bytes, as `out` is uint8
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


LocalKind = Literal["auto", "mmap", "pinned", "gds"]


def open_reader(paths: Sequence[Path], device: torch.device, kind: LocalKind) -> Reader:
    """Return a reader of files for a device, of the recipe's kind.

    A GPU needs about 50 KB/s of token ids, so `auto` uses the page cache, which all processes of a
    machine share. If GPUDirect Storage is impossible, pinned buffers are used.
    """
    if kind == "gds":
        if reason := why_not(paths[0], device):
            _log.warning("GPUDirect Storage is impossible, so pinned buffers are used: %s", reason)
            return PinnedReader(paths, device)
        return GdsReader(paths, device)
    return PinnedReader(paths, device) if kind == "pinned" else MmapReader(paths)


def open_for_bulk(paths: Sequence[Path], device: torch.device) -> Reader:
    """Return the best reader for gigabytes that are read once: a checkpoint, a model's weights."""
    if device.type != "cuda":
        return BufferedReader(paths)
    reason = why_not(paths[0], device)
    reader = PinnedReader(paths, device) if reason else GdsReader(paths, device)
    _log.info("reading %s with %s%s", paths[0].parent, reader.name, f"; {reason}" * bool(reason))
    return reader
