"""Experts divided over processes: each has some of a layer's experts, and tokens travel to them.

The processes are those that have different tokens and shards of the same weights. What else of a
model is sharded over all of them is, for the experts, sharded over those that have the same ones.

Source: Lepikhin et al. 2020, "GShard". Shape suffixes as in `models/experts.py`, and P processes,
L experts of a process, A rows that arrive at one.
"""

# ruff: noqa: N803, N806 (names that end in their shape)

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from pipelines.models.experts import ExpertLinear, Experts, inverse, permuted
from pipelines.models.transformer import Transformer


class Exchange:
    """Sends each row to the process that has its expert, and brings the result back."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """Over the processes of a mesh of one dimension, which have the experts in its order."""
        self._mesh = mesh

    def __call__(
        self, through: Callable[[Tensor, Tensor], Tensor], x_RD: Tensor, routes_E: Tensor
    ) -> Tensor:
        """Map [R, D] to [R, D].

        The host must know how many rows go and come: it waits for the device here.

        Args:
            through: This process's experts: maps rows, sorted by expert, and the number of rows of
                each expert to as many rows.
            x_RD: This process's rows, sorted by expert.
            routes_E: The number of rows of each expert of the layer.
        """
        sent_PL = routes_E.view(self._mesh.size(), -1)
        came_PL = all_to_all_single(sent_PL, None, None, self._mesh)
        goes, comes = torch.stack((sent_PL.sum(dim=1), came_PL.sum(dim=1))).tolist()
        x_AD = all_to_all_single_autograd(x_RD, comes, goes, self._mesh)
        numbers = torch.arange(came_PL.shape[1], device=came_PL.device).repeat(len(came_PL))
        experts_A = numbers.repeat_interleave(came_PL.flatten(), output_size=sum(comes))
        order_A = experts_A.argsort(stable=True)
        back_A = inverse(order_A)
        y_AD = through(permuted(x_AD, order_A, back_A), came_PL.sum(dim=0, dtype=torch.int32))
        y_AD = permuted(y_AD, back_A, order_A)
        return all_to_all_single_autograd(y_AD, goes, comes, self._mesh)


def expert_parallel(part: Transformer, mesh: DeviceMesh) -> None:
    """Give a decoder, or a stage of one, its experts, in place, after `tensor_parallel`."""
    for module in part.modules():
        if isinstance(module, Experts):
            module.exchange = Exchange(mesh)
        if isinstance(module, ExpertLinear):
            for name, each in list(module.named_parameters()):
                mine = nn.Parameter(_experts_here(each, mesh), each.requires_grad)
                module.register_parameter(name, mine)
            # They add up over the tokens of all these processes, by which FSDP does not divide.
            module.gradient_factor = 1 / mesh.size()


def _experts_here(weight: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return this process's experts, which may have been divided by features before."""
    devices, placements = mesh, list[Placement]([Shard(0)])
    held: Tensor = weight.detach()
    if isinstance(held, DTensor):
        devices = DeviceMesh._concatenate([mesh, held.device_mesh])
        placements += held.placements
        held = held.to_local()
    mine = held.chunk(mesh.size())[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(mine, devices, placements, run_check=False)


def sharded_dimensions(experts: Experts) -> dict[nn.Parameter, Shard]:
    """Return along which dimension each parameter of experts is sharded: if it can, a whole one,
    but never along the rank of an adapter.
    """
    found = {}
    for name, weight in experts.named_parameters():
        by_features = isinstance(weight, DTensor) and Shard(1) in weight.placements
        by_columns = by_features and weight.ndim == 3 and "lora_b" not in name
        found[weight] = Shard(2) if by_columns or "lora_a" in name else Shard(1)
    return found
