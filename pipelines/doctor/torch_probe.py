"""What only torch can tell of a machine, asked in a process of its own.

`python -m pipelines.doctor.torch_probe [FILE]` prints it as JSON; `facts` runs that.
"""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

from pydantic import BaseModel, ConfigDict

from pipelines.core.settings import load_settings
from pipelines.doctor.all_reduce import Group, Reduced, run, run_bounded
from pipelines.doctor.findings import NotHereError
from pipelines.doctor.host import existing
from pipelines.doctor.tools import limit_s, once

_CPU_PROCESSES = 2
_PROBE_BYTES = 1 << 20
_PINNED = 64 << 20


class Facts(BaseModel):
    """What torch finds on one machine.

    Attributes:
        devices: GPUs that torch can use.
        nccl: Its version; None without GPUs.
        processes: That took part in an all-reduce: one a GPU, or two without.
        reduced: What came out of it.
        pinned: Why memory can't be pinned; None where it can, or there is no GPU.
        gds: Why a file can't be read into a GPU directly; None where it was.
    """

    model_config = ConfigDict(frozen=True)

    devices: int
    nccl: str | None
    processes: int
    reduced: Reduced
    pinned: str | None
    gds: str | None


@once
def facts() -> Facts:
    """Ask torch.

    Raises:
        NotHereError: torch is not installed.
        FaultError: the process failed, or hangs.
    """
    if find_spec("torch") is None:
        raise NotHereError("torch is not installed")
    with ExitStack() as stack:
        command = [sys.executable, "-m", __name__, *_file_to_read(stack)]
        return Facts.model_validate_json(run_bounded(command, 0.95 * limit_s()))


def _file_to_read(stack: ExitStack) -> list[str]:
    """Write a file on the data's own disk to be read; none where that disk can't be written."""
    place = existing(load_settings().home)
    try:
        temporary = NamedTemporaryFile(prefix=".doctor-", dir=place)  # noqa: SIM115 (the stack's)
        file = stack.enter_context(temporary)
        file.write(b"\0" * _PROBE_BYTES)
        file.flush()
    except OSError:  # which the check of the disk's speed tells
        return []
    return [file.name]


def probe(file: Path | None) -> Facts:
    """Measure; the all-reduce comes first, as its processes are forked before a GPU is used."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # counts GPUs without touching them
    import torch

    devices = torch.cuda.device_count()
    processes = devices or _CPU_PROCESSES
    with TemporaryDirectory(prefix="doctor-") as folder:
        group = Group(
            address=f"file://{folder}/store",
            world=processes,
            first=0,
            here=processes,
            on_gpu=bool(devices),
        )
        outcome = run(group)
    return Facts(
        devices=devices,
        nccl=_nccl_version() if devices else None,
        processes=processes,
        reduced=outcome,
        pinned=_reason(_pin) if devices else None,
        gds=_gds(file),
    )


def _nccl_version() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _pin() -> None:
    import torch

    torch.empty(_PINNED, dtype=torch.uint8).pin_memory()


def _reason(work: Callable[[], None]) -> str | None:
    try:
        work()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _gds(file: Path | None) -> str | None:
    import torch

    from pipelines.core.errors import UserError
    from pipelines.loading.sources.gpu_readers import why_not

    if file is None:
        return "no file can be written there to be read"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return why_not(file, device)
    except UserError as error:
        return str(error)


if __name__ == "__main__":
    sys.stdout.write(probe(Path(sys.argv[1]) if sys.argv[1:] else None).model_dump_json())
