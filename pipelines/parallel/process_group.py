"""This process and the others of its job, whether torchrun, Ray Train or nobody started them.

After each step, all ranks learn without a wait whether one of them has a request: each rank's vote
travels with its loss, which is summed over all ranks anyway. The host reads the sum one step late,
when it has already arrived, while the device works on the next step.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipelines.core.errors import SharedError, UnreachableError, UserError
from pipelines.parallel.mesh import Mesh, set_timeout

T = TypeVar("T")
# Segments that grow hold tensors of changing sizes without gaps between them. Pinned memory above
# 1 MiB is not rounded to a power of two, which may be twice as much; torch 2.11, with which the
# acceptance may run, can't be told so.
_ALLOCATOR = "expandable_segments:True"
if torch.__version__ >= "2.13":
    _ALLOCATOR += ",pinned_max_round_threshold_mb:1"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_OUTSIDE = "192.0.2.1"  # of TEST-NET-1, which nobody has


@contextmanager
def process_group(
    stall_seconds: float | None = None, *, even_alone: bool = False
) -> Iterator[torch.device]:
    """Connect the processes by the variables that torchrun sets, and yield this one's device.

    Args:
        stall_seconds: The time after which the watchdog names a stalled process; see `set_timeout`.
        even_alone: Make a group of one process, too, as `fully_shard` needs one.
    """
    # Each process else connects to all others at once: half a million connections for 1,000 ranks.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    device = _device()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    ours = not dist.is_initialized() and (world > 1 or even_alone)
    if world > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        _choose_interface()
    if ours:
        backend = dist.get_default_backend_for_device(device)
        if world > 1:
            # A group that knows its device needs no first collective to guess it.
            known = None if device.type == "cpu" else device
            dist.init_process_group(backend, device_id=known)
        else:
            store = torch._C._distributed_c10d.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if stall_seconds is not None and dist.is_initialized():
        set_timeout(stall_seconds)
    ended = device.type == "cpu"  # a GPU's group ends as one: after a failure not all would come
    try:
        yield device
        ended = True
    finally:
        if ours and ended:
            dist.destroy_process_group()


def _choose_interface() -> None:
    """Let gloo listen on the network interface from which MASTER_ADDR is reached.

    Left alone, it listens where the host's own name leads, which on many hosts is the loopback. So
    may MASTER_ADDR on the host that has that name: there it is the interface of the default route.
    GPUs need it too: checkpoints and errors pass through gloo.
    """
    for address in (os.environ.get("MASTER_ADDR", ""), _OUTSIDE):
        with suppress(OSError, ValueError):  # then gloo is left alone, and says what it can't reach
            family, kind, *_, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as unused:
                unused.connect(target)  # nothing is sent
                own = unused.getsockname()[0]
            if not ip_address(own).is_loopback and (interface := interface_of(own)):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
                return


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address; None where none has."""
    import psutil  # type: ignore[import-untyped]

    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    return next(
        (name for name, has in interfaces.items() if any(each.address == address for each in has)),
        None,
    )


def _device() -> torch.device:
    """Return the accelerator with this process's local number, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    # A launcher may show each process its own device only.
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    if accelerator.type == "cuda" and not any(map(os.environ.get, _ALLOCATOR_VARIABLES)):
        torch._C._accelerator_setAllocatorSettings(_ALLOCATOR)
    return torch.device(accelerator.type, index)


def rank() -> int:
    """Return this process's number among those of its job; 0 where it is alone."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def from_all(mine: T) -> list[T]:
    """Return what every process gives, by rank; all call it."""
    if not dist.is_initialized():
        return [mine]
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, mine)
    return given


def numbers_from_all(mine: Sequence[float], device: torch.device) -> Tensor:
    """Return equally many numbers of each process as fp32 [ranks, numbers]; only rank 0 waits."""
    sent = torch.tensor(mine, device=device)
    gathered = sent.new_empty(dist.get_world_size() * len(mine))
    dist.all_gather_single(gathered, sent)
    rows = gathered.view(-1, len(mine))  # on the device, as the host need not wait elsewhere
    return rows.cpu() if dist.get_rank() == 0 else rows


@contextmanager
def one_for_all() -> Iterator[None]:
    """End all processes with the line of a user's error in one of them; a barrier at the end.

    Without it, the others would wait in their next collective until that times out. What is done
    in it must hold no collective: another process may be in that one.

    Raises:
        SharedError: with the line of the first process that has one.
        UnreachableError: where that is one.
    """
    mine: UserError | None = None
    try:
        yield
    except UserError as error:
        mine = error
    if first := next(filter(None, from_all(mine)), None):
        kind = UnreachableError if isinstance(first, UnreachableError) else SharedError
        raise kind(str(first)) from mine


def from_one(look: Callable[[], T], group: dist.ProcessGroup | None, rank: int = 0) -> T:
    """Return what one process of a gloo group finds; all call it. Without a group, it is alone.

    Raises:
        SharedError: as `one_for_all`, if looking does.
    """
    if group is None:
        return look()
    with one_for_all():
        found: list[Any] = [look() if dist.get_rank() == rank else None]
    dist.broadcast_object_list(found, src=rank, group=group)
    result: T = found[0]
    return result


class _Votes(NamedTuple):
    """The number of ranks with a request in a step, on its way to the host."""

    number: Tensor  # a scalar on the CPU
    arrived: torch.Event | None  # None: it has arrived


class StepConsensus:
    """Tells all ranks whether one of them has a request, with the same answer on each."""

    def __init__(self, mesh: Mesh) -> None:
        """Begin with no votes."""
        self._mesh = mesh
        self._before = self._now = _Votes(torch.zeros(()), None)

    def sum(self, nats: Tensor, *names: str, wanted: bool) -> Tensor:
        """Sum the loss and the votes over the ranks.

        Args:
            nats: The loss, a scalar on the device.
            names: The mesh's dimensions whose processes have different tokens.
            wanted: Whether this rank has a request.

        Returns:
            The sum of the losses, a scalar.
        """
        both = torch.stack((nats, torch.full_like(nats, float(wanted))))
        self._mesh.sum(both, *names)
        total, votes = both.unbind()
        others = [name for name in vars(self._mesh.layout) if name not in names]
        self._mesh.sum(votes, *others)
        self._before, self._now = self._now, _to_host(votes)
        return total

    def is_wanted(self) -> bool:
        """Return whether a rank had a request in the step before the last one."""
        if self._before.arrived is not None:
            self._before.arrived.synchronize()
        return self._before.number.item() > 0


def _to_host(votes: Tensor) -> _Votes:
    if votes.device.type == "cpu":
        return _Votes(votes, None)
    copy = votes.to("cpu", non_blocking=True)  # to pinned memory, without a wait
    return _Votes(copy, torch.accelerator.current_stream().record_event())
