"""The messages of a step: each kind of collective by the processes that take part."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.utils._pytree import tree_iter

from pipelines.parallel.mesh import Mesh


@dataclass
class Collective:
    """Collectives of one kind and group in a step of one process.

    Attributes:
        kind: The operator's name.
        group: The mesh's dimensions along which its processes lie; `all` is all of them.
        size: The number of its processes.
        bytes: Of the whole tensors: what all get in a gather, what each gives in a reduction.
        count: How many there are.
    """

    kind: str
    group: str
    size: int
    bytes: int = 0
    count: int = 0


class CollectiveLog:
    """The collectives that a process took part in."""

    def __init__(self, mesh: Mesh) -> None:
        """Log those of the process whose place is in `mesh`."""
        several = [name for name, size in vars(mesh.layout).items() if size > 1]
        self._names = {mesh.line(name).get_group().group_name: name for name in several}
        self._found: dict[tuple[str, str, int], Collective] = {}

    @property
    def found(self) -> list[Collective]:
        """Those found, the largest first."""
        return sorted(self._found.values(), key=lambda each: -each.bytes)

    def see(self, operator: Any, arguments: tuple[Any, ...], result: Any, times: int) -> None:
        """Count an operator if it is a collective, `times` times."""
        if operator not in collective_ops or operator in sync_ops:
            return
        group: dist.ProcessGroup = CollectiveOp.get_process_group(operator, arguments)
        kind = operator._schema.name.partition("::")[2].strip("_")
        named = self._names.get(group.group_name, group.group_desc.removeprefix("mesh_"))
        key = _KINDS.get(kind, kind), _ALL.get(named, named), group.size()
        collective = self._found.setdefault(key, Collective(*key))
        collective.bytes += times * max(map(_bytes, (*arguments, result)))
        collective.count += times


_ALL = {"default_pg": "all"}
_KINDS = {
    "allreduce": "all_reduce",
    "allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "recv": "receive",
}


def _bytes(argument: Any) -> int:
    return sum(each.nbytes for each in tree_iter(argument) if isinstance(each, Tensor))
