"""ZeRO's stage 1: whole weights and gradients everywhere, each process's share of the update.

The optimizer is given the shares as DTensors, so its state is divided, and is saved and loaded
under any layout. `ZeroRedundancyOptimizer` gives each process whole tensors instead, which
`torch.distributed.checkpoint` can't name as parts of one.

Source: Rajbhandari et al. 2020, "ZeRO", section 5.1.

Replicas and shards of a model over the processes that see tokens of their own.

| `parallel.sharding` | ZeRO | by | divided over `dp_shard * cp` |
|---|---|---|---|
| `none` | 0 | DistributedDataParallel | nothing |
| `optimizer` | 1 | the same, and `ShardedUpdate` | the optimizer's state |
| `gradients` | 2 | `fully_shard`, weights kept from forward to backward | all three |
| `full` | 3 | `fully_shard`, weights gathered block by block, twice | all three |

ZeRO's stage 2 (Rajbhandari et al. 2020) keeps whole weights on every process. FSDP2, which is used
for it here, also divides them between steps: it holds less than stage 2 promises, and gathers them
once a step, as stage 2 does after its update. Over `dp_replicate` all of it is there again. The
processes of one sequence (`cp`) see other tokens of it: to sharding they are like any others.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as RowShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pipelines.models.experts import Experts
from pipelines.parallel.expert_parallel import sharded_dimensions
from pipelines.parallel.mesh import Mesh
from pipelines.recipe.training_section import Parallel

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
        """Make each optimizer step begin with its shares of gradients and end with all weights."""
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
        """Return the rows of each process as DTensor divides them: the last may have fewer, or
        none.
        """
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


def is_fully_sharded(mesh: Mesh, parallel: Parallel) -> bool:
    """Return whether FSDP2 carries the weights, and not DistributedDataParallel.

    It also replicates weights that are tensor parallel, and pipeline stages whose schedule computes
    gradients of weights apart: DistributedDataParallel can't.
    """
    if mesh.devices is None:
        return False
    replicas = mesh.layout.tp * mesh.layout.pp > 1 and mesh.layout.dp_cp > 1
    return parallel.sharding in ("gradients", "full") or replicas


def shard(
    part: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: Mesh,
    parallel: Parallel,
    dtype: torch.dtype | None,
    same_experts: DeviceMesh | None = None,
) -> None:
    """Divide the weights of `part` among processes, in place; they may be on the meta device.

    Args:
        part: Calls `blocks` in its forward pass.
        blocks: Each is gathered, used and given up by itself.
        mesh: `dp_replicate`, `dp_shard` and `cp` are used.
        parallel: `sharding`, `reduce_dtype` and `cpu_offload` are used.
        dtype: In which weights are gathered and used; None: as they are.
        same_experts: The processes with the same experts, if they have some of a layer's only.
    """
    devices = _replicas_and_shards(mesh, parallel)
    offload = OffloadPolicy()
    if parallel.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu")
    # Inputs keep their type: autocast chooses it for each operation, as without sharding.
    added_up_in = torch.float32 if dtype else None
    if parallel.reduce_dtype == "bf16":
        added_up_in = torch.bfloat16
    policy = MixedPrecisionPolicy(dtype, added_up_in, None, False)
    # The zero-bubble schedule comes back to weights after the backward pass through them.
    gives_up = parallel.sharding == "full" and (
        mesh.layout.pp == 1 or parallel.schedule != "zero_bubble"
    )
    divide = partial(fully_shard, mp_policy=policy, offload_policy=offload)
    if same_experts is not None:
        copies = mesh.along("dp_replicate")
        theirs = same_experts if copies is None else DeviceMesh._concatenate([copies, same_experts])
        for block in blocks:
            if isinstance(block.mlp, Experts):
                divide(
                    [block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj],
                    mesh=theirs,
                    reshard_after_forward=gives_up,
                    shard_placement_fn=sharded_dimensions(block.mlp).get,
                )
    for module in (*blocks, part):
        # What the root gathers, its backward pass needs at once.
        gathers_twice = gives_up and module is not part
        divide(module, mesh=devices, reshard_after_forward=gathers_twice)


def _replicas_and_shards(mesh: Mesh, parallel: Parallel) -> DeviceMesh:
    """Return the mesh of replicas and shards: one dimension, that of shards, or two."""
    replicas, shards = ["dp_replicate"], ["dp_shard"]
    (replicas if parallel.sharding == "none" else shards).append("cp")
    copies, divided = mesh.along(*replicas), mesh.line(*shards)
    return divided if copies is None else DeviceMesh._concatenate([copies, divided])


def replicate(part: nn.Module, mesh: Mesh, parallel: Parallel) -> nn.Module:
    """Gradients become the mean over the processes with other tokens in the last backward pass.

    Weights need to be there, and the same everywhere.
    """
    others = mesh.along("dp_replicate", "dp_shard", "cp")
    if others is None:
        return part
    replicated = DistributedDataParallel(
        part,
        process_group=others.get_group(),
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        # No parameter is unused. But without this, buckets change after the first step, and with
        # them the order in which a ring of more than two adds gradients up: a resumed run would
        # differ in the last bit. It costs a walk over the graph and a small sum in each step.
        find_unused_parameters=others.size() > 2,
    )
    if parallel.reduce_dtype == "bf16":  # micro-batches are still added up in fp32
        replicated.register_comm_hook(others.get_group(), add_up_in_bf16)
    return replicated


def add_up_in_bf16(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Exchange a bucket of gradients in bf16; torch refuses its own hook by name without CUDA."""
    return bf16_compress_hook(group, bucket)


@contextmanager
def sync_if(is_last: bool, part: nn.Module) -> Iterator[None]:
    """Replicas exchange gradients once a step: not before its last backward pass.

    Shards do in each one, as whole gradients that wait would be what sharding is to spare.
    """
    if isinstance(part, DistributedDataParallel) and not is_last:
        with part.no_sync():
            yield
        return
    if isinstance(part, FSDPModule):
        part.set_requires_all_reduce(is_last)
    yield
