"""What tensors take on a device; on a CPU, where torch keeps no count, as a profiled step shows."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def memory_in_use(
    device: torch.device,
    modules: Iterable[nn.Module],
    optimizer: Optimizer,
    step_bytes: int | None,
) -> int | None:
    """The most bytes that tensors have had on a device; None on a CPU until a step was looked into.

    A process's whole memory is none to compare with a plan: most of a small run's is torch itself.

    Args:
        device: Of the model.
        modules: That hold weights and tables.
        optimizer: Whose moments there are.
        step_bytes: On a CPU, what a step allocates at most beside those.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if step_bytes is None:
        return None
    return step_bytes + _bytes(_held(modules, optimizer))


def _held(modules: Iterable[nn.Module], optimizer: Optimizer) -> Iterable[Tensor]:
    """Tensors that outlive a step; gradients are made anew in each."""
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()
    for state in optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of storages, each once."""
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    storages = {each.data_ptr(): each.untyped_storage() for each in map(Tensor.detach, local)}
    return sum(each.nbytes() for each in storages.values())
