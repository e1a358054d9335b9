"""Bringing whole parameters to the process that writes them to a file."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipelines.models.family_weights import Shapes
from pipelines.models.transformer import Transformer
from pipelines.models.weights import Place, is_sharded, whole

T = TypeVar("T")


class Gather:
    """Brings whole parameters to one process from those that hold them."""

    def __init__(self, shapes: Shapes, places: Mapping[str, Place]) -> None:
        """Learn which process holds which parameters, asking others only if some are not here."""
        self.rank, self.world = 0, 1
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._shapes = shapes
        self._places = places
        here = {name: each.dtype for name, each in places.items()}
        self._holders: list[Mapping[str, torch.dtype]] = [here] * self.world
        if shapes.keys() != places.keys():
            dist.all_gather_object(self._holders, here)

    def __call__(self, name: str, to: int) -> Tensor:
        """Return a whole parameter on the rank `to`; what other ranks get is meaningless."""
        mine = self._places.get(name)
        # All processes that share the parameter call `whole`, as it is a collective operation.
        tensor = torch.empty(0) if mine is None else whole(mine)
        if name in self._holders[to]:
            return tensor
        holder = next(number for number, names in enumerate(self._holders) if name in names)
        if self.rank == holder:
            dist.send(tensor.contiguous(), to)
        elif self.rank == to:
            like = next(iter(self._places.values()))
            here = like.device_mesh.device_type if is_sharded(like) else like.device
            tensor = torch.empty(self._shapes[name], dtype=self._holders[holder][name], device=here)
            dist.recv(tensor, holder)
        return tensor


def of_all_stages(parts: Sequence[Transformer], here: dict[str, T]) -> dict[str, T]:
    """Return what each process has by name; in a pipeline, all call this together."""
    if sum(len(part.layers) for part in parts) == parts[0].config.layers:
        return here
    found = [here] * dist.get_world_size()
    dist.all_gather_object(found, here)
    return {name: value for each in found for name, value in each.items()}
