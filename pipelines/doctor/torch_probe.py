"""What only torch can tell, asked in a process of its own: collectives, pinned memory, GDS.

`python -m pipelines.doctor.torch_probe FILE` prints one JSON object; `facts` runs that. Nobody can
hang here for long: NCCL that waits for a card that never answers is killed with its process.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipelines.core.settings import PROJECT
from pipelines.doctor.findings import FaultError, NotHereError
from pipelines.doctor.tools import once

_LIMIT_S = 8.5
_CPU_PROCESSES = 2
_PROBE_BYTES = 1 << 20
_REDUCED = {"gloo": 1 << 22, "nccl": 1 << 28}  # bytes
_ROUNDS = 5
_PINNED = 64 << 20


@dataclass(frozen=True)
class Facts:
    """Of one machine.

    Attributes:
        devices: GPUs that torch can use; 0 on a machine without.
        nccl: Its version; None without CUDA.
        backend: Of the all-reduce.
        processes: That took part in it.
        right: Whether each got the sum.
        bandwidth: Bus bandwidth, bytes/s: 2 (n-1)/n times the bytes over the time, as nccl-tests
            define it.
        pinned: Why memory can't be pinned; None where it can, or there is no GPU.
        gds: Why a file can't be read into a GPU directly; None where it was.
    """

    devices: int
    nccl: str | None
    backend: str
    processes: int
    right: bool
    bandwidth: float
    pinned: str | None
    gds: str | None


@once
def facts() -> Facts:
    """Ask torch.

    Raises:
        NotHereError: torch is not installed.
        FaultError: the process failed, or hangs.
    """
    from importlib.util import find_spec

    from pipelines.core.settings import load_settings
    from pipelines.doctor.mounts import existing

    if find_spec("torch") is None:
        raise NotHereError("torch is not installed")
    with TemporaryDirectory(prefix="doctor-", dir=_writable(existing(load_settings().home))) as tmp:
        file = Path(tmp) / "probe"
        file.write_bytes(b"\0" * _PROBE_BYTES)
        return Facts(**json.loads(_run([sys.executable, "-m", __name__, str(file)])))


def _writable(folder: Path) -> Path | None:
    """The folder, or the system's temporary one where it is somebody else's."""
    return folder if os.access(folder, os.W_OK) else None


def _run(command: list[str]) -> str:
    child = subprocess.Popen(
        command,
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its own children can be ended with it
    )
    try:
        output, errors = child.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        child.communicate()
        raise FaultError(
            f"an all-reduce did not end in {_LIMIT_S} s",
            "run it with NCCL_DEBUG=INFO: python -m pipelines.doctor.torch_probe FILE; "
            "NCCL_SOCKET_IFNAME and a firewall are the usual reasons",
        ) from None
    if child.returncode:
        last = errors.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        mend = f"NCCL_DEBUG=INFO {' '.join(command[1:])} says more"
        raise FaultError(f"an all-reduce failed: {last[0]}", mend)
    return output


def main() -> None:
    """Measure, and print it; this process alone imports torch, and forks before it uses a GPU."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # counts GPUs without touching them
    import torch
    from torch.multiprocessing.spawn import start_processes

    devices = torch.cuda.device_count()
    processes = devices or _CPU_PROCESSES
    with TemporaryDirectory(prefix="doctor-") as folder:
        start_processes(  # type: ignore[no-untyped-call]
            _member, (processes, bool(devices), folder), processes, start_method="fork"
        )
        results = [json.loads(path.read_text()) for path in Path(folder).glob("result-*")]
    file = Path(sys.argv[1])
    sys.stdout.write(
        json.dumps(
            asdict(
                Facts(
                    devices=devices,
                    nccl=_nccl_version() if devices else None,
                    backend="nccl" if devices else "gloo",
                    processes=processes,
                    right=len(results) == processes and all(each["right"] for each in results),
                    bandwidth=min(each["bandwidth"] for each in results),
                    pinned=_reason(_pin) if devices else None,
                    gds=_gds(file),
                )
            )
        )
    )


def _member(rank: int, world: int, on_gpu: bool, folder: str) -> None:
    """One process of the all-reduce."""
    import torch
    import torch.distributed as dist

    backend = "nccl" if on_gpu else "gloo"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    count = _REDUCED[backend] // 4
    numbers = torch.full((count,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    right = bool((numbers == world * (world + 1) / 2).all())
    best = min(_seconds(lambda: dist.all_reduce(numbers), on_gpu) for _ in range(_ROUNDS))
    bandwidth = 2 * (world - 1) / world * 4 * count / best
    result = json.dumps({"right": right, "bandwidth": bandwidth})
    (Path(folder) / f"result-{rank}").write_text(result)
    dist.destroy_process_group()


def _seconds(work: Callable[[], Any], on_gpu: bool) -> float:
    import torch

    began = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


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


def _gds(file: Path) -> str | None:
    import torch

    from pipelines.core.errors import UserError
    from pipelines.loading.gds import why_not

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return why_not(file, device)
    except UserError as error:
        return str(error)


if __name__ == "__main__":
    main()
