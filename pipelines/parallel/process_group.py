"""This process and the others of its job, whoever started them: torchrun, Ray Train or nobody."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipelines.core.errors import SharedError, UnreachableError, UserError

T = TypeVar("T")


@contextmanager
def process_group(*, even_alone: bool = False) -> Iterator[torch.device]:
    """This process's device, with the others connected, by the variables that torchrun sets.

    Args:
        even_alone: Make a group of one process, too, as `fully_shard` needs one.
    """
    device = _device()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    ours = not dist.is_initialized() and (world > 1 or even_alone)
    if ours:
        backend = dist.get_default_backend_for_device(device)
        if world > 1:
            dist.init_process_group(backend)
        else:
            store = torch._C._distributed_c10d.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    ended = device.type == "cpu"  # a GPU's group ends as one: after a failure not all would come
    try:
        yield device
        ended = True
    finally:
        if ours and ended:
            dist.destroy_process_group()


def _device() -> torch.device:
    """The accelerator of this process's number on its machine, of whatever make, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    # A launcher may show each process its own device only.
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def rank() -> int:
    """Return this process's number among those of its job; 0 where it is alone."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def from_all(mine: T) -> list[T]:
    """What every process gives, by rank; all call it."""
    if not dist.is_initialized():
        return [mine]
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, mine)
    return given


@contextmanager
def one_for_all() -> Iterator[None]:
    """A user's error in one process ends all of them with its line; a barrier at the end.

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
