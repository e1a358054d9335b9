"""The norm of a whole model's gradient, wherever its parts are, and clipping by it."""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from pipelines.parallel.mesh import Mesh


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter], mesh: Mesh) -> Tensor:
    """Return the 2-norm over all parameters of all processes, a scalar on the device.

    Each number counts once: what several processes hold alike is divided by their number, and one
    sum over all processes gives the whole. A gradient that still waits to be added up over tensor
    parallel processes is added up here.
    """
    squares: dict[int, list[Tensor]] = {}  # by the processes that share out a parameter
    for parameter in parameters:
        if parameter.grad is None:
            continue
        parameter.grad = _added_up(parameter.grad)
        squares.setdefault(_shards(parameter.grad), []).append(local(parameter.grad))
    holders = mesh.layout.world // mesh.layout.pp  # a pipeline's stages have different parameters
    zero = torch.zeros((), device=mesh.device)
    if mesh.layout.pp == 1 and squares.keys() <= {1}:
        return _square_sum(squares.get(1, []), zero).sqrt()
    total = zero
    for shards, gradients in squares.items():
        total = total + _square_sum(gradients, zero) * (shards / holders)
    dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    """Multiply all of them, in place; `factor` is on their device."""
    gradients = [local(each.grad) for each in parameters if each.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def beside(parameter: Tensor, *scalars: Tensor) -> tuple[Tensor, ...]:
    """Return scalars on the parameter's device, to which offload may have moved the update.

    The host then waits for the GPU, once for all of them, as the update on the CPU must anyway.
    """
    if parameter.device.type == scalars[0].device.type:
        return scalars
    copies = torch.stack(scalars).to(parameter.device, non_blocking=True)  # to pinned memory
    torch.accelerator.current_stream().record_event().synchronize()
    return copies.unbind()


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return what to multiply gradients of this norm by, at most 1, as `clip_grad_norm_` does."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that may be a DTensor, without a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _added_up(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor) and any(each.is_partial() for each in gradient.placements):
        whole = [Replicate() if each.is_partial() else each for each in gradient.placements]
        return gradient.redistribute(placements=whole)
    return gradient


def _shards(gradient: Tensor) -> int:
    """Among how many processes a tensor is divided."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return prod(size for size, placement in sizes if not placement.is_replicate())


def _square_sum(gradients: list[Tensor], zero: Tensor) -> Tensor:
    if not gradients:
        return zero
    norms = torch.stack(torch._foreach_norm(gradients))
    # Offloaded: the host need not wait until the GPU has it.
    return norms.square().sum().to(zero.device, non_blocking=True)
