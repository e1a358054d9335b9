"""A real all-reduce, over the processes of one machine or of several.

`python -m pipelines.doctor.all_reduce GROUP` runs this machine's part in a process of its own,
which alone imports torch; `reduced` starts that, and kills it when it takes too long, as NCCL waits
for ever for a card or a network that never answers.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel, ConfigDict

from pipelines.core.product import PRODUCT
from pipelines.doctor.findings import FaultError, NoAnswerError
from pipelines.doctor.nvidia_smi import fix_of
from pipelines.doctor.tools import run_in_time

_BYTES = {"gloo": 1 << 22, "nccl": 1 << 28}
_ROUNDS = 5
_ERROR = re.compile(r"[\w.]*(Error|Exception): \S")
_FIX = (
    "run a job with NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME, NCCL_IB_HCA and firewalls between nodes "
    "are the usual reasons"
)


class Group(BaseModel):
    """The processes, and which of them are here.

    Attributes:
        address: Where they meet: `file:///path`, or `tcp://host:port`, which the first one opens.
        world: How many there are.
        first: The rank of the first one here.
        here: How many are here.
        on_gpu: Whether each has a GPU, and NCCL; else it is gloo's.
    """

    model_config = ConfigDict(frozen=True)

    address: str
    world: int
    first: int
    here: int
    on_gpu: bool

    @property
    def backend(self) -> str:
        """As torch names it."""
        return "nccl" if self.on_gpu else "gloo"


class Reduced(BaseModel):
    """What came out of it.

    Attributes:
        right: Whether every process here got the sum.
        bandwidth: Bus bandwidth of the slowest, bytes/s: 2 (n-1)/n times the bytes over the time,
            as nccl-tests define it.
    """

    model_config = ConfigDict(frozen=True)

    right: bool
    bandwidth: float


def reduced(group: Group, limit_s: float) -> Reduced:
    """Run this machine's part of the all-reduce, in a process of its own.

    Raises:
        FaultError: it failed, or did not end in time.
    """
    output = run_bounded([sys.executable, "-m", __name__, group.model_dump_json()], limit_s)
    return Reduced.model_validate_json(output)


def run_bounded(command: list[str], limit_s: float) -> str:
    """Return what a process of ours prints; it and its children are ended when it takes too long.

    Raises:
        FaultError: it failed, or did not end in time.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = run_in_time(command, limit_s, cwd=PRODUCT, env=environment)
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"an all-reduce did not end in {limit_s:.1f} s", _FIX) from None
    if done.returncode:
        words = reason_of(done.stderr) or f"exit code {done.returncode}"
        raise FaultError(f"an all-reduce failed: {words}", fix_of(done.stderr, _FIX))
    return done.stdout


def reason_of(errors: str) -> str:
    """Return the traceback's line with the error; CUDA and NCCL print advice below it."""
    lines = errors.strip().splitlines()
    named = [line for line in lines if _ERROR.match(line)]
    return (named or lines or [""])[-1]


def run(group: Group) -> Reduced:
    """Fork the processes that are here; nothing may have used a GPU before."""
    from torch.multiprocessing.spawn import start_processes

    with TemporaryDirectory(prefix="doctor-") as folder:
        start_processes(  # type: ignore[no-untyped-call]
            _member, (group, folder), group.here, start_method="fork"
        )
        results = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    return Reduced(
        right=len(results) == group.here and all(right for right, _ in results),
        bandwidth=min(bandwidth for _, bandwidth in results),
    )


def _member(number: int, group: Group, folder: str) -> None:
    """One process."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", number) if group.on_gpu else torch.device("cpu")
    if group.on_gpu:
        torch.cuda.set_device(device)
    rank, world = group.first + number, group.world
    dist.init_process_group(group.backend, init_method=group.address, rank=rank, world_size=world)
    count = _BYTES[group.backend] // 4
    numbers = torch.full((count,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    right = bool((numbers == world * (world + 1) / 2).all())
    best = min(_seconds(lambda: dist.all_reduce(numbers), group.on_gpu) for _ in range(_ROUNDS))
    bandwidth = 2 * (world - 1) / world * 4 * count / best
    (Path(folder) / str(rank)).write_text(json.dumps([right, bandwidth]))
    dist.destroy_process_group()


def _seconds(work: Callable[[], Any], on_gpu: bool) -> float:
    import torch

    began = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.stdout.write(run(Group.model_validate_json(sys.argv[1])).model_dump_json())
