"""The other processes of a job, which don't exist: their messages arrive at once, and are empty."""

import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from pipelines.models.weights import COMPUTE_DTYPES
from pipelines.parallel import data_parallel, pipeline_parallel
from pipelines.parallel.pipeline_parallel import Stage, pipeline_parts
from pipelines.recipe.recipe import Recipe

_BUCKET = 25 << 20  # bytes of gradients that DistributedDataParallel exchanges together
# Methods that compute with numbers of ranks, which must not become fake tensors.
_MESH_METHODS = (
    "__init__",
    "__getitem__",
    "_flatten",
    "_concatenate",
    "_compute_coordinates_from_mesh",
    "_get_mesh_tensor_from_full_mesh",
    "get_local_rank",
    "get_coordinate",
)


@contextmanager
def fake_group(world: int, rank: int, neighbours: int) -> Iterator[None]:
    """Make this process one of `world` within the block; `neighbours` are those of a node."""
    os.environ |= {
        "WORLD_SIZE": str(world),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % neighbours),
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "new_group", _new_group(dist.new_group)))
        for name in _MESH_METHODS:
            if name in vars(DeviceMesh):
                stack.enter_context(patch.object(DeviceMesh, name, _unseen(name)))
        replicas = patch.object(data_parallel, "DistributedDataParallel", Replicas)
        stack.enter_context(replicas)
        if world > 1:
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        yield


@contextmanager
def fake_stages(recipe: Recipe, width: int) -> Iterator[None]:
    """Tell each pipeline stage the shapes that it exchanges: no other process can tell it."""
    micro_batch, length = recipe.train.fixed_micro_batch_size, recipe.data.sequence_length
    dtype = COMPUTE_DTYPES.get(recipe.train.fixed_precision)

    def stage(part: Any, number: int, count: int, device: torch.device, group: Any) -> Any:
        shape = (micro_batch, length // part.sequence_shards, width)
        stream = functools.partial(
            torch.empty, shape, dtype=dtype or torch.float32, device=device, requires_grad=True
        )
        ids = torch.empty(micro_batch, length, dtype=torch.int64, device=device)
        loss = torch.empty((), device=device, requires_grad=True)
        return Stage(
            part,
            number,
            count,
            device,
            input_args=stream() if number else ids,
            output_args=loss if number == count - 1 else stream(),
            group=group,
        )

    def parts(*arguments: Any) -> Any:
        with _disable_current_modes():  # the whole model is no fake tensors yet
            return pipeline_parts(*arguments)

    def voted(*_: Any, **__: Any) -> Tensor:
        with _disable_current_modes():
            return torch.ones(1, dtype=torch.int32)

    with (
        patch.object(pipeline_parallel, "pipeline_parts", parts),
        patch.object(pipeline_parallel, "Stage", stage),
        patch.object(PipelineStage, "_warmup_forward_vote", voted),
        patch.object(PipelineStage, "_warmup_backward_result", voted),
    ):
        yield


def _new_group(real: Any) -> Any:
    """Every group is as fake as that of all processes."""

    def new_group(*arguments: Any, backend: str | None = None, **named: Any) -> Any:
        return real(*arguments, backend="fake" if backend == "gloo" else backend, **named)

    return new_group


def _unseen(name: str) -> Any:
    """Return a method of DeviceMesh that runs outside of all modes of torch."""
    real = getattr(DeviceMesh, name)

    @functools.wraps(real)
    def run(*arguments: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return real(*arguments, **named)

    return staticmethod(run) if isinstance(vars(DeviceMesh)[name], staticmethod) else run


class Replicas(DistributedDataParallel):
    """DistributedDataParallel in Python: that of torch asks fake gradients for their addresses.

    As there, gradients are views of buckets that live as long as the module, and a bucket is added
    up as soon as its gradients are there.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup, **_: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync = True
        self._group = process_group
        self._added_up_in: torch.dtype | None = None
        trained = [each for each in module.parameters() if each.requires_grad]
        bucket: list[nn.Parameter] = []
        for parameter in reversed(trained):  # gradients come in this order
            if bucket and sum(each.nbytes for each in (*bucket, parameter)) > _BUCKET:
                self._fill(bucket)
                bucket = []
            bucket.append(parameter)
        self._fill(bucket)

    def _fill(self, parameters: list[nn.Parameter]) -> None:
        sizes = [each.numel() for each in parameters]
        flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        waiting: set[nn.Parameter] = set()
        for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):

            def arrived(parameter: nn.Parameter, view: Tensor = part) -> None:
                if not self.require_backward_grad_sync:
                    return
                waiting.add(parameter)
                gradient, parameter.grad = parameter.grad, view.view_as(parameter)
                parameter.grad.copy_(gradient)  # type: ignore[arg-type]
                if len(waiting) == len(parameters):
                    waiting.clear()
                    sent = flat if self._added_up_in is None else flat.to(self._added_up_in)
                    sent.div_(self._group.size())
                    dist.all_reduce(sent, group=self._group)
                    if sent is not flat:
                        flat.copy_(sent)

            parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def register_comm_hook(self, _state: object, hook: Any) -> None:
        """Exchange gradients as the hook does."""
        self._added_up_in = {data_parallel.add_up_in_bf16: torch.bfloat16}[hook]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **named)
