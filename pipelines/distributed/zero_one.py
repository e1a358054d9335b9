"""ZeRO's stage 1: whole weights and gradients everywhere, each process's share of the update.

The optimizer is given the shares as DTensors, so its state is divided, and is saved and loaded
under any layout. `ZeroRedundancyOptimizer` gives each process whole tensors instead, which
`torch.distributed.checkpoint` can't name as parts of one.

Source: Rajbhandari et al. 2020, "ZeRO", section 5.1.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as RowShard
from torch.optim import Optimizer

_BUCKET = 1 << 26  # bytes that are gathered together


class ShardedUpdate:
    """The rows of each parameter that this process updates.

    Attributes:
        shards: By the parameters' names: views of their memory, so that an update in place, or a
            checkpoint that is loaded into the parameters, is seen in both.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
        """Divide along `mesh`, of one dimension; the parameters are the same on all of it."""
        self._mesh = mesh
        self._whole = dict(parameters)
        self.shards = {name: self._shard(each) for name, each in parameters.items()}

    def attach(self, optimizer: Optimizer) -> None:
        """Before each of its steps the gradients' shares are taken, after it weights exchanged."""
        optimizer.register_step_pre_hook(self._take_gradients)
        optimizer.register_step_post_hook(self._gather)

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self._rows(parameter.detach()), requires_grad=parameter.requires_grad)

    def _rows(self, whole: Tensor) -> DTensor:
        """This process's rows, as a part of the whole; the memory is the same."""
        rows = self._chunks(whole)[self._mesh.get_local_rank()]
        return DTensor.from_local(
            rows,
            self._mesh,
            [RowShard(0)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    def _chunks(self, whole: Tensor) -> list[Tensor]:
        """The rows of each process as DTensor divides them: the last may have fewer, or none."""
        chunks = list(whole.chunk(self._mesh.size()))
        return chunks + [whole[:0]] * (self._mesh.size() - len(chunks))

    def _take_gradients(self, *_: Any) -> None:
        for name, shard in self.shards.items():
            if (gradient := self._whole[name].grad) is not None:
                shard.grad = self._rows(gradient)

    @torch.no_grad()
    def _gather(self, *_: Any) -> None:
        """All processes get all rows; those of many parameters travel together."""
        for bucket in self._buckets():
            chunks = [self._chunks(whole) for whole in bucket]
            longest = max(
                sum(each[rank].numel() for each in chunks) for rank in range(self._mesh.size())
            )
            mine = bucket[0].new_empty(longest)
            rows = [each[self._mesh.get_local_rank()] for each in chunks]
            torch._foreach_copy_(_like(rows, mine), rows)
            gathered = bucket[0].new_empty(self._mesh.size() * longest)
            dist.all_gather_single(gathered, mine, group=self._mesh.get_group())
            for rank, flat in enumerate(gathered.chunk(self._mesh.size())):
                rows = [each[rank] for each in chunks]
                torch._foreach_copy_(rows, _like(rows, flat))
        for shard in self.shards.values():
            shard.grad = None

    def _buckets(self) -> Iterator[list[Tensor]]:
        """Parameters of one type, as many at a time as `_BUCKET` bytes hold."""
        bucket: list[Tensor] = []
        size = 0
        for parameter in self._whole.values():
            whole = parameter.detach()
            if bucket and (size + whole.nbytes > _BUCKET or whole.dtype != bucket[0].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(whole)
            size += whole.nbytes
        if bucket:
            yield bucket


def _like(tensors: list[Tensor], flat: Tensor) -> list[Tensor]:
    """Views of the start of `flat`, one behind the other, shaped like the tensors."""
    sizes = [each.numel() for each in tensors]
    parts = torch.split(flat[: sum(sizes)], sizes)
    return [part.view_as(each) for part, each in zip(parts, tensors, strict=True)]
