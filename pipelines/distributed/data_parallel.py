"""Replicas and shards of a model over the processes that see tokens of their own.

| `parallel.sharding` | ZeRO | by | divided over `dp_shard * cp` |
|---|---|---|---|
| `none` | 0 | DistributedDataParallel | nothing |
| `optimizer` | 1 | the same, and `zero_one.py` | the optimizer's state |
| `gradients` | 2 | `fully_shard`, weights kept from forward to backward | all three |
| `full` | 3 | `fully_shard`, weights gathered block by block, twice | all three |

ZeRO's stage 2 (Rajbhandari et al. 2020) keeps whole weights on every process. FSDP2, which is used
for it here, also divides them between steps: it holds less than stage 2 promises, and gathers them
once a step, as stage 2 does after its update. Over `dp_replicate` all of it is there again. The
processes of one sequence (`cp`) see other tokens of it: to sharding they are like any others.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from pipelines.core.recipe_training import Parallel
from pipelines.distributed.mesh import Mesh


def is_fully_sharded(mesh: Mesh, parallel: Parallel) -> bool:
    """Whether FSDP2 carries the weights, and not DistributedDataParallel.

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
) -> None:
    """Divide the weights of `part` among processes, in place; they may be on the meta device.

    Args:
        part: Calls `blocks` in its forward pass.
        blocks: Each is gathered, used and given up by itself.
        mesh: `dp_replicate`, `dp_shard` and `cp` are used.
        parallel: `sharding` and `cpu_offload` are used.
        dtype: In which weights are gathered and used; None: as they are. Gradients are added up
            in the weights' own.
    """
    devices = _replicas_and_shards(mesh, parallel)
    offload = OffloadPolicy()
    if parallel.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu")
    # Inputs keep their type: autocast chooses it for each operation, as without sharding.
    policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, None, False)
    # The zero-bubble schedule comes back to weights after the backward pass through them.
    gives_up = parallel.sharding == "full" and (
        mesh.layout.pp == 1 or parallel.schedule != "zero_bubble"
    )
    for module in (*blocks, part):
        fully_shard(
            module,
            mesh=devices,
            # What the root gathers, its backward pass needs at once.
            reshard_after_forward=gives_up and module is not part,
            mp_policy=policy,
            offload_policy=offload,
        )


def _replicas_and_shards(mesh: Mesh, parallel: Parallel) -> DeviceMesh:
    """Of one dimension, that of shards, or of two."""
    replicas, shards = ["dp_replicate"], ["dp_shard"]
    (replicas if parallel.sharding == "none" else shards).append("cp")
    copies, divided = mesh.along(*replicas), mesh.line(*shards)
    return divided if copies is None else DeviceMesh._concatenate([copies, divided])


def replicate(part: nn.Module, mesh: Mesh) -> nn.Module:
    """Gradients become the mean over the processes with other tokens in the last backward pass.

    Weights need to be there, and the same everywhere.
    """
    others = mesh.along("dp_replicate", "dp_shard", "cp")
    if others is None:
        return part
    return DistributedDataParallel(
        part,
        process_group=others.get_group(),
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        # Else its buckets change after the first step, and with them the order in which a ring
        # adds gradients up: a resumed run would differ in the last bit.
        find_unused_parameters=True,
    )


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
