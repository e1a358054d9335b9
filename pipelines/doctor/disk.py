"""The home's disk: how it is mounted, how fast it is, and what the recipe asks of it."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from pipelines.core.formatting import duration, size
from pipelines.core.settings import load_settings
from pipelines.doctor.findings import Seen, ok, problem, warning
from pipelines.doctor.host import NETWORK, Mount, data_mount, existing
from pipelines.recipe.recipe import Recipe

_CHUNK = 8 << 20
_HALF_S = 0.4  # for writing, and again for reading
_MOST = 1 << 30
_NFS_TRANSFER = 1 << 20  # the most that Linux's client takes for rsize and wsize (nfs(5))
_GONE = {"tmpfs", "ramfs", "overlay"}
_STATE_BYTES = 12  # a weight and both of AdamW's moments, in fp32: a checkpoint of full training
_PATIENCE_S = 300.0  # that all GPUs wait for a checkpoint at a restart; ours, not a standard's


@dataclass(frozen=True)
class Speed:
    """Bytes/s, one process and one file."""

    write: float
    read: float


def mounted() -> Iterator[Seen]:
    """Yield what the home lies on."""
    yield from assess_mount(data_mount())


def assess_mount(mount: Mount) -> Iterator[Seen]:
    """State that lasts wants a disk that lasts; NFS wants to be hard, and to move much at once."""
    saw = f"{mount.point} is {mount.kind} on {mount.source}"
    faults = []
    if mount.kind in _GONE:
        fix = "set PENSTOCK_HOME to a disk, or mount a volume there"
        faults.append(warning(f"{saw}: what lies there goes with the machine or container", fix))
    if "ro" in mount.options:
        faults.append(problem(f"{saw}, read-only", "remount it, or set PENSTOCK_HOME elsewhere"))
    if mount.kind.startswith("nfs"):
        if "soft" in mount.options or "softerr" in mount.options:
            fix = "mount it hard: a checkpoint that a soft mount gave up on is cut short"
            faults.append(problem(f"{saw}, soft", fix))
        sizes = {key: mount.options.get(key, "") for key in ("rsize", "wsize")}
        small = [
            f"{key}={value}"
            for key, value in sizes.items()
            if value.isdecimal() and int(value) < _NFS_TRANSFER
        ]
        if small:
            fix = f"mount it with rsize={_NFS_TRANSFER},wsize={_NFS_TRANSFER}"
            faults.append(warning(f"{saw} with {', '.join(small)}", fix))
    yield from faults or [ok(saw + ", over the network" * (mount.kind in NETWORK))]


def speed(recipe: Recipe) -> Iterator[Seen]:
    """Yield a second's writing and reading, against the recipe."""
    folder = existing(load_settings().home)
    try:
        found = measure(folder)
    except OSError as error:
        fix = "fix its owner, rights or free space, or set PENSTOCK_HOME elsewhere"
        yield problem(f"{folder} can't be written: {error.strerror}", fix)
        return
    yield assess_disk_speed(found, checkpoint_bytes(recipe))


def measure(folder: Path) -> Speed:
    """Write, sync, forget and read a file of as much as fits into the time."""
    chunk = os.urandom(_CHUNK)  # nothing that a drive could compress
    with NamedTemporaryFile(dir=folder, prefix=".doctor-", buffering=0) as file:
        written, began = 0, time.perf_counter()
        while time.perf_counter() - began < _HALF_S and written < _MOST:
            written += file.write(chunk)
            os.fdatasync(file.fileno())
        write = written / (time.perf_counter() - began)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        into, read, began = bytearray(_CHUNK), 0, time.perf_counter()
        while time.perf_counter() - began < _HALF_S and (got := file.readinto(into)):
            read += got
        return Speed(write, read / (time.perf_counter() - began))


def checkpoint_bytes(recipe: Recipe) -> int:
    """Return a checkpoint's bytes; 0 where a folder has the shape, or adapters alone train."""
    from pipelines.models.presets import preset

    if recipe.model.init_from is not None or recipe.adapter.kind != "none":
        return 0
    config = preset(recipe.model.preset)
    vocabulary = config.vocab_size or recipe.data.tokenizer.vocab_size
    length = config.context_length or recipe.data.sequence_length
    return _STATE_BYTES * config.sized(vocabulary, length).parameters


def assess_disk_speed(found: Speed, checkpoint: int) -> Seen:
    """Return tokens are tens of KB/s a GPU; it is checkpoints that a slow disk holds up."""
    saw = f"writes {size(found.write)}/s, reads {size(found.read)}/s"
    if not checkpoint:
        return ok(saw)
    write, read = checkpoint / found.write, checkpoint / found.read
    what = f"a checkpoint of {size(checkpoint)} is written in {duration(write)}"
    saw = f"{saw}: {what}, read in {duration(read)}"
    if max(write, read) <= _PATIENCE_S:
        return ok(saw)
    return warning(
        f"{saw} by one process",
        "let several nodes write (sharding), or point train.checkpoints at faster storage",
    )
