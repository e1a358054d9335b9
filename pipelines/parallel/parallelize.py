"""A decoder laid over a mesh: tensor and context parallel, checkpointing, compile, data parallel.

| `parallel` | each process has | by |
|---|---|---|
| `pp` | consecutive layers | `pipeline_parallel.py` |
| `tp` | a part of each layer's features, on the same tokens | `tensor_parallel.py` |
| `cp` | whole layers, on a part of each sequence | `context_parallel.py` |
| `dp_replicate`, `dp_shard` | layers, or shards of them, on own samples | `data_parallel.py` |

They combine, but for what `parallel/layout.py` and `division.py` refuse.

Activation checkpointing: what of a block is computed again in the backward pass, not kept.

Papers: sublinear memory (Chen et al. 2016); selective recomputation (Korthikanti et al. 2022).

Regional compile: a decoder's blocks, which are alike, are compiled once and not one by one.

Products in fp8: Micikevicius et al. 2022, "FP8 formats for deep learning"; `mxfp8.py`.
"""

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch._functorch.config
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.models.lora import adapted_layers
from pipelines.models.loss import CrossEntropy
from pipelines.models.transformer import Transformer
from pipelines.models.weights import COMPUTE_DTYPES, canonical_name
from pipelines.parallel.compiler_repair import repair_compiler
from pipelines.parallel.data_parallel import ShardedUpdate, is_fully_sharded, replicate, shard
from pipelines.parallel.division import FP8_MULTIPLES, gathers_in_fp8
from pipelines.parallel.mesh import Mesh
from pipelines.parallel.process_group import one_for_all
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.training_section import Fp8Scaling, Parallel

_log = logging.getLogger(__name__)
_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
# Expensive to compute again: matrix products, attention, sums over processes and their exchanges.
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
    _c10d.all_reduce.default,
    _c10d.all_to_all_single.default,
    _c10d.reduce_scatter_tensor.default,
}
# Importing the first takes seconds, and the others are a decoder's own.
_KEPT_BY_NAME = {
    "torch_attn::_varlen_attn",
    "penstock::product_by_expert",
    "penstock::nf4_product",
}
# The hooks of FSDP run at other times when a block is computed again.
SAC_IGNORED_OPS.add(torch.ops.profiler._record_function_enter_new.default)
SAC_IGNORED_OPS.add(torch.ops.profiler._record_function_exit._RecordFunction)
_OF_ADAPTERS = ("aten::mm", "aten::_grouped_mm", "penstock::product_by_expert")


def checkpoint_activations(
    blocks: Iterable[nn.Module],
    mode: Literal["none", "selective", "full"],
) -> None:
    """Make each block keep less between its forward and its backward pass.

    A block's `forward` is replaced and the block is not wrapped: parameters keep their names, and
    hooks on it, such as FSDP's, run once. Losses and gradients stay the same to the bit.

    Args:
        blocks: Modules that depend on nothing but their inputs, parameters and random numbers.
        mode: `full` keeps a block's inputs; `selective` also the outputs of matrix products,
            attention, sums over processes and their exchanges, so that only what is cheap is
            computed again. LoRA's second product is cheap and as large as the one beside it: it is
            computed again, too.
    """
    if mode == "none":
        return
    blocks = list(blocks)
    adapters = (each for block in blocks for each in adapted_layers(block).values())
    policy = partial(_policy, {each.size.rank for each in adapters})
    contexts = partial(create_selective_checkpoint_contexts, policy)
    further = {"context_fn": contexts} if mode == "selective" else {}
    for block in blocks:
        block.forward = _checkpointed(block.forward, further)


def _checkpointed(forward: Any, further: dict[str, Any]) -> Any:
    def recomputed(*arguments: Any, **named: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **further, **named)

    return recomputed


def _policy(
    adapter_ranks: set[int], _context: Any, operator: Any, *arguments: Any, **_named: Any
) -> CheckpointPolicy:
    is_product = operator.name() in _OF_ADAPTERS
    is_second_of_adapter = is_product and arguments[0].shape[1] in adapter_ranks
    is_kept = operator in _KEPT or operator.name() in _KEPT_BY_NAME
    if is_kept and not is_second_of_adapter:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def to_fp8(
    part: nn.Module, scaling: Fp8Scaling, device: torch.device, *, gathered: bool = False
) -> None:
    """Make the blocks' matrix products use fp8, but not the head's.

    On a CPU, which has no fp8, they round as fp8 does and multiply in a wider type.

    Args:
        part: Its blocks' linear layers are replaced; parameters and their names stay.
        scaling: What shares a scale.
        device: Where the products are computed.
        gathered: Whether FSDP2 shall also gather these layers' weights in fp8.
    """
    # It takes seconds, and is for fp8 GPUs only.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear_utils import swap_linear_layers

    def convertible(module: nn.Module, name: str) -> bool:
        sizes = getattr(module, "in_features", 1), getattr(module, "out_features", 1)
        return name.startswith("layers.") and not any(
            size % FP8_MULTIPLES[scaling] for size in sizes
        )

    emulated = device.type == "cpu"
    if scaling == "mx":
        from pipelines.parallel.mxfp8 import MXLinear

        swap_linear_layers(
            part, partial(MXLinear.of, emulated=emulated), module_filter_fn=convertible
        )
        return
    config = replace(
        Float8LinearConfig.from_recipe_name(scaling),
        enable_fsdp_float8_all_gather=gathered,
        emulate=emulated,
    )
    convert_to_float8_training(part, config=config, module_filter_fn=convertible)


def _turned_again(graph: fx.GraphModule, _: Any) -> fx.GraphModule:
    """Mark gathered weights in fp8 that the backward pass reads by columns, not to be kept for it.

    torch 2.13 knows which of a graph's inputs exist anyway by numbers that are wrong once inputs
    consist of several tensors: it would keep the turned copies of whole weights between the passes.
    """
    for node in graph.graph.nodes:
        if node.target is not _aten.clone.default or node.meta["val"].dtype not in _FP8:
            continue
        source = node.args[0]
        while source.target is _aten.permute.default:
            source = source.args[0]
        if source.op == "placeholder":
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return graph


def _scale_weights(part: nn.Module, _: Any) -> None:
    """Find the scales of all weights that are gathered in fp8 at once, not one by one."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(part)


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def check_path(device: torch.device, folder: Path = Path(torch.__file__).parent) -> None:
    """Raise UserError where what is compiled can't be linked with torch, which is in `folder`.

    torch 2.13 does not quote the path of its libraries when it links code for a CPU.
    """
    if device.type == "cpu" and " " in str(folder):
        raise UserError(
            f"train.compile: torch can't compile for a CPU from {folder}, a path with a space; "
            "move the project or set train.compile = false"
        )


def keep_compiled() -> None:
    """Keep what is compiled for the next run; torch looks here once, when it compiles first."""
    os.environ.setdefault(_CACHE, str(load_settings().home / "torchinductor"))


def compile_blocks(
    part: Transformer,
    backend: str | Callable[..., Any] = "inductor",
    options: dict[str, Any] | None = None,
) -> None:
    """Compile each block, and the loss where it is here, in place; a graph break is an error.

    It is a block's `forward` that is compiled: hooks on the block, such as FSDP's, stay outside,
    and parameters keep their names. A micro-batch of another size makes one more graph, for all
    sizes. What is compiled is kept in `PENSTOCK_HOME`, or where TORCHINDUCTOR_CACHE_DIR says.
    """
    keep_compiled()
    # DDP needs no cuts in a graph as small as a block, and its cutter does not know checkpointing.
    torch._dynamo.config.optimize_ddp = False
    # Routers count in the forward pass; the one that is computed again need not count.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    regions = list(part.layers.values())
    compiled = partial(torch.compile, fullgraph=True, backend=backend, options=options)
    if isinstance(loss := part.cross_entropy, CrossEntropy):  # not one that exchanges
        regions.append(loss)
        loss.by_position = compiled(loss.by_position)  # type: ignore[method-assign]
    for region in regions:
        region.forward = compiled(region.forward)


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
        """Return all parts' parameters by their names in the whole model; tied ones once.

        So a head that is parted from its embeddings has their name.
        """
        return {
            _EMBEDDINGS if parameter is module.tied_copy else canonical_name(name): parameter
            for module in self.modules
            for name, parameter in module.named_parameters()
        }

    def parameters(self) -> list[nn.Parameter]:
        """Return those of `named_parameters`; their gradients are this process's."""
        return list(self.named_parameters().values())

    def counted(self) -> list[nn.Parameter]:
        """Return those of them that no other stage of a pipeline counts too."""
        copies = {id(module.tied_copy) for module in self.modules}
        return [each for each in self.parameters() if id(each) not in copies]

    def tied_over_stages(self) -> nn.Parameter | None:
        """Return the weight that a pipeline's first and last stage share, or None."""
        if self.mesh.layout.pp == 1 or not self.modules[0].config.tie_embeddings:
            return None
        return self.named_parameters().get(_EMBEDDINGS)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return what the optimizer updates, by name: the trained parameters, or this process's
        rows.
        """
        if self._sharded_update is not None:
            return self._sharded_update.shards
        return {name: each for name, each in self.named_parameters().items() if each.requires_grad}

    def changed(self) -> dict[str, Tensor]:
        """Return what training changes of the model, by name; nothing is copied."""
        named = self.named_parameters().items()
        found = {name: each.detach() for name, each in named if each.requires_grad}
        for part in self.modules:
            found |= part.balance_biases
        return found

    def check_overlap(self, recipe: Recipe) -> None:
        """Say in the log what `parallel.async_tp` overlaps; all graphs are compiled.

        Raises:
            SharedError: it overlaps nothing in some process.
        """
        if recipe.parallel.async_tp:
            from pipelines.parallel.async_tensor_parallel import Exchanges

            with one_for_all():
                line = Exchanges.compiled().check()
            if self.mesh.rank == 0:
                _log.info("%s", line)

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
    if recipe.train.fixed_compile:
        check_path(mesh.device)
        if mesh.device.type == "cuda":
            repair_compiler()
    parts = [model] if mesh.layout.pp == 1 else _stages(model, mesh, parallel)
    experts = mesh.experts(parallel.ep) if parallel.ep > 1 else None
    laid = [_lay(part, mesh, recipe, fill, experts) for part in parts]
    return Parallelized(mesh, laid, shards_update=parallel.sharding == "optimizer")


def _stages(model: Transformer, mesh: Mesh, parallel: Parallel) -> list[Transformer]:
    from pipelines.parallel.pipeline_parallel import pipeline_parts

    return pipeline_parts(model, mesh, parallel.schedule)


def _lay(
    part: Transformer,
    mesh: Mesh,
    recipe: Recipe,
    fill: Callable[[Transformer], None] | None,
    experts: tuple[DeviceMesh, DeviceMesh] | None,
) -> nn.Module:
    parallel, train = recipe.parallel, recipe.train
    sharded = is_fully_sharded(mesh, parallel)
    gathers_fp8 = sharded and gathers_in_fp8(
        part.config,
        mesh.layout,
        train.fixed_precision,
        train.fp8_scaling,
        offloaded=parallel.cpu_offload,
    )
    if train.fixed_precision == "fp8":
        to_fp8(part, train.fp8_scaling, mesh.device, gathered=gathers_fp8)
    if (tp := mesh.along("tp")) is not None:
        from pipelines.parallel.tensor_parallel import tensor_parallel

        tensor_parallel(part, tp, sequence_parallel=parallel.sequence_parallel)
    if (cp := mesh.along("cp")) is not None:
        from pipelines.parallel.context_parallel import context_parallel

        context_parallel(part, cp)
    if experts is not None:
        from pipelines.parallel.expert_parallel import expert_parallel

        expert_parallel(part, experts[1])
    _compute_again(part, recipe, tp)
    if sharded:
        dtype = COMPUTE_DTYPES.get(train.fixed_precision)
        same_experts = None if experts is None else experts[0]
        shard(part, part.layers.values(), mesh, parallel, dtype, same_experts)
    if gathers_fp8:
        torch._functorch.config.joint_custom_pass = _turned_again
        # At each call, as weights may also change by a checkpoint that is loaded.
        part.register_forward_pre_hook(_scale_weights, prepend=True)
    if fill is not None:
        _make_room(part, mesh.device, on_cpu=sharded and parallel.cpu_offload)
        fill(part)
    return part if sharded else replicate(part, mesh, parallel)


def _compute_again(part: Transformer, recipe: Recipe, tp: DeviceMesh | None) -> None:
    """Activation checkpointing, then compile, which so decides together what is computed again.

    Whole blocks that are divided are compiled first: torch 2.13 can't keep a mesh, which a DTensor
    has, between the two halves of a graph that is computed again.
    """
    train = recipe.train
    again = partial(checkpoint_activations, part.layers.values(), train.activation_checkpoint)
    compiled_first = tp is not None and train.activation_checkpoint == "full"
    if not compiled_first:
        again()
    if train.fixed_compile:
        compile_blocks(part, options=_compiler_options(recipe, tp))
    if compiled_first:
        again()


def _compiler_options(recipe: Recipe, tp: DeviceMesh | None) -> dict[str, Any] | None:
    if tp is None or not recipe.parallel.async_tp:
        return None
    from pipelines.parallel.async_tensor_parallel import compiler_options

    return compiler_options(tp)


def _make_room(model: nn.Module, device: torch.device, *, on_cpu: bool) -> None:
    """Memory for a model from the meta device; only its weights may wait on the CPU."""
    model.to_empty(device=torch.device("cpu") if on_cpu else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
