"""A decoder laid over a mesh: tensor and context parallel, checkpointing, compile, data parallel.

| `parallel` | each process has | by |
|---|---|---|
| `pp` | consecutive layers | `pipeline_plan.py` |
| `tp` | a part of each layer's features, on the same tokens | `tensor_plan.py` |
| `cp` | whole layers, on a part of each sequence | `context_plan.py` |
| `dp_replicate`, `dp_shard` | layers, or shards of them, on own samples | `data_parallel.py` |

They combine, but for what `distributed/layout.py` and `division.py` refuse.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipelines.core.recipe import Recipe
from pipelines.core.recipe_training import Parallel, Train
from pipelines.distributed.activation_checkpoint import checkpoint_activations
from pipelines.distributed.data_parallel import is_fully_sharded, replicate, shard
from pipelines.distributed.mesh import Mesh
from pipelines.distributed.zero_one import ShardedUpdate
from pipelines.models.compile import check_path, compile_blocks
from pipelines.models.transformer import Transformer
from pipelines.models.weights import COMPUTE_DTYPES, canonical_name

_EMBEDDINGS = "embed_tokens.weight"


@dataclass(frozen=True)
class Parallelized:
    """What this process holds of a model.

    Attributes:
        parts: The modules to call; several where a process holds several pipeline stages.
        shards_update: Whether each process updates its share only, of weights that all have whole.
    """

    mesh: Mesh
    parts: list[nn.Module]
    shards_update: bool = False

    @property
    def modules(self) -> list[Transformer]:
        """The parts, without what calls them to exchange their gradients."""
        wrapped = (DistributedDataParallel,)
        return [part.module if isinstance(part, wrapped) else part for part in self.parts]  # type: ignore[misc]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Of all parts, by their names in the whole model; tied ones once.

        So a head that is parted from its embeddings has their name.
        """
        return {
            _EMBEDDINGS if parameter is module.tied_copy else canonical_name(name): parameter
            for module in self.modules
            for name, parameter in module.named_parameters()
        }

    def parameters(self) -> list[nn.Parameter]:
        """Those of `named_parameters`; their gradients are this process's."""
        return list(self.named_parameters().values())

    def counted(self) -> list[nn.Parameter]:
        """Those of them that no other stage of a pipeline counts too."""
        copies = {id(module.tied_copy) for module in self.modules}
        return [each for each in self.parameters() if id(each) not in copies]

    def tied_over_stages(self) -> nn.Parameter | None:
        """The weight that a pipeline's first and last stage share; None in other processes."""
        if self.mesh.layout.pp == 1 or not self.modules[0].config.tie_embeddings:
            return None
        return self.named_parameters().get(_EMBEDDINGS)

    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by name: the trained parameters, or this process's rows."""
        if self._sharded_update is not None:
            return self._sharded_update.shards
        return {name: each for name, each in self.named_parameters().items() if each.requires_grad}

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the parameters up to date with what an optimizer of `trained` does."""
        if self._sharded_update is not None:
            self._sharded_update.attach(optimizer)

    @cached_property
    def _sharded_update(self) -> ShardedUpdate | None:
        along = self.mesh.along("dp_shard", "cp")
        if not self.shards_update or along is None:
            return None
        named = self.named_parameters().items()
        return ShardedUpdate({name: each for name, each in named if each.requires_grad}, along)


def parallelize(
    model: Transformer,
    mesh: Mesh,
    recipe: Recipe,
    fill: Callable[[Transformer], None] | None = None,
) -> Parallelized:
    """Lay a model over the mesh, in place.

    Args:
        model: On the mesh's device with the same weights in every process; or on the meta device,
            so that no process ever holds more of it than its part.
        mesh: Of all processes.
        recipe: `parallel` and `train` are used.
        fill: Gives a model from the meta device its weights, which it then has memory for.
    """
    parallel = recipe.parallel
    if recipe.train.compile:
        check_path(mesh.device)
    parts = [model] if mesh.layout.pp == 1 else _stages(model, mesh, parallel)
    laid = [_lay(part, mesh, recipe, fill) for part in parts]
    return Parallelized(mesh, laid, shards_update=parallel.sharding == "optimizer")


def _stages(model: Transformer, mesh: Mesh, parallel: Parallel) -> list[Transformer]:
    from pipelines.models.pipeline_plan import pipeline_parts

    return pipeline_parts(model, mesh, parallel.schedule)


def _lay(
    part: Transformer,
    mesh: Mesh,
    recipe: Recipe,
    fill: Callable[[Transformer], None] | None,
) -> nn.Module:
    parallel, train = recipe.parallel, recipe.train
    if (tp := mesh.along("tp")) is not None:
        from pipelines.models.tensor_plan import tensor_parallel

        tensor_parallel(part, tp, sequence_parallel=parallel.sequence_parallel)
    if (cp := mesh.along("cp")) is not None:
        from pipelines.models.context_plan import context_parallel

        context_parallel(part, cp)
    _compute_again(part, train, divided=tp is not None)
    sharded = is_fully_sharded(mesh, parallel)
    if sharded:
        shard(part, part.layers.values(), mesh, parallel, COMPUTE_DTYPES.get(train.precision))
    if fill is not None:
        _make_room(part, mesh.device, on_cpu=sharded and parallel.cpu_offload)
        fill(part)
    return part if sharded else replicate(part, mesh)


def _compute_again(part: Transformer, train: Train, *, divided: bool) -> None:
    """Activation checkpointing, then compile, which so decides together what is computed again.

    Whole blocks that are divided are compiled first: torch 2.13 can't keep a mesh, which a DTensor
    has, between the two halves of a graph that is computed again.
    """
    blocks, mode = part.layers.values(), train.activation_checkpoint
    compiled_first = divided and mode == "full"
    if not compiled_first:
        checkpoint_activations(blocks, mode)
    if train.compile:
        compile_blocks(part)
    if compiled_first:
        checkpoint_activations(blocks, mode)


def _make_room(model: nn.Module, device: torch.device, *, on_cpu: bool) -> None:
    """Memory for a model from the meta device; only its weights may wait on the CPU."""
    model.to_empty(device=torch.device("cpu") if on_cpu else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
