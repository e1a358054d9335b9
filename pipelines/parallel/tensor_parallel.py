"""What Megatron's tensor parallelism needs besides torch's styles: norms, embeddings and the loss.

Papers: Megatron-LM (Shoeybi et al. 2019), its sequence parallelism (Korthikanti et al. 2022).
Shape suffixes: P positions, V this process's part of the vocabulary.

How a decoder is divided over tensor-parallel processes.

Megatron's split: what a block reads is divided by columns, what it writes to the residual stream
by rows, so that a block needs two exchanges. The residual stream between them lies along the
sequence (sequence parallel) or whole in each process. Embeddings and head lie over the vocabulary.

An adapter beside a layer is divided as the layer is: beside columns its second matrix, by rows its
first. What lies between the two, as narrow as its rank, is then what is exchanged. A frozen layer
in NF4 is divided by `quantized_parallel.py`.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import embedding

from pipelines.core.errors import UserError
from pipelines.loading.dataloader import IGNORED
from pipelines.models.experts import ExpertLinear
from pipelines.models.lora import LoRALinear
from pipelines.models.quantization import NF4Linear
from pipelines.models.transformer import Block, FeedForward, Transformer
from pipelines.parallel.division import check_divisible
from pipelines.parallel.quantized_parallel import QuantizedColumns, QuantizedRows

# ruff: noqa: N803, N806 (names that end in their shape)


class Replicated(ParallelStyle):
    """A module whose weights all processes have whole, on inputs that lie over them.

    torch's `SequenceParallel` is the case of inputs and outputs that lie along the sequence.
    """

    def __init__(self, inputs: Placement, outputs: Placement, *, local: bool = False) -> None:
        """Take the layouts of the first input, where that is no DTensor yet, and of the output.

        Args:
            inputs: How the input lies.
            outputs: How the output shall lie.
            local: Whether the output is this process's plain tensor, not a DTensor.
        """
        super().__init__()
        self._inputs = inputs
        self._outputs = outputs
        self._local = local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            self._replicate,
            # torch's types forget what the two return
            self._prepare,  # type: ignore[arg-type]
            self._finish,  # type: ignore[arg-type]
        )

    def _replicate(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        _divide(module, Replicate(), mesh, self.src_data_rank)

    def _prepare(self, _: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        first, *others = inputs
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, (self._inputs,), run_check=False)
        return first, *others

    def _finish(self, _: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        output = output.redistribute(mesh, (self._outputs,))
        return output.to_local() if self._local else output


class _OfAllHeads(Replicated):
    """What the heads of all processes read: each process has a part of its gradient."""

    def _finish(self, _: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.redistribute(mesh, (self._outputs,)).to_local(grad_placements=[Partial()])


def _divide(layer: nn.Module, placement: Placement, mesh: DeviceMesh, source: int | None) -> None:
    """Lay a layer's parameters over the processes, in place; `source` as `src_data_rank`."""
    for name, weight in list(layer.named_parameters(recurse=False)):
        # A bias beside matrices that are divided by their inputs is whole.
        lies = Replicate() if placement == Shard(weight.ndim) else placement
        part = distribute_tensor(weight, mesh, [lies], src_data_rank=source)
        layer.register_parameter(name, nn.Parameter(part, weight.requires_grad))


class VocabularyEmbedding(ParallelStyle):
    """Each process looks up the tokens of its part of the vocabulary, and the results are added.

    torch's `RowwiseParallel` gives the same, but makes the gradient of the whole vocabulary in each
    process.
    """

    def __init__(self, outputs: Placement) -> None:
        """Take the layout of the output, which is this process's plain tensor."""
        super().__init__()
        self._outputs = outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _divide(module, Shard(0), device_mesh, self.src_data_rank)
        module.forward = partial(self._look_up, module, device_mesh)
        return module

    def _look_up(self, module: nn.Module, mesh: DeviceMesh, tokens: Tensor) -> Tensor:
        weight = cast("DTensor", module.get_parameter("weight"))
        mine = weight.to_local()
        places = tokens - _first(weight.shape[0], mesh)
        here = (places >= 0) & (places < len(mine))
        found = embedding(places.where(here, 0), mine) * here.unsqueeze(-1)
        whole = DTensor.from_local(found, mesh, [Partial()], run_check=False)
        return whole.redistribute(mesh, [self._outputs]).to_local()


class VocabularyCrossEntropy(nn.Module):
    """Summed nats of logits whose vocabulary lies over processes: none sees another's logits.

    As Megatron-LM's `vocab_parallel_cross_entropy`: the processes exchange three numbers a
    position, the largest logit, the sum of exponentials and the target's logit.
    """

    def __init__(self, mesh: DeviceMesh, vocabulary: int, ignored: int) -> None:
        """Over the processes of a mesh of one dimension.

        Args:
            mesh: Tensor parallel.
            vocabulary: Of all processes; the last one's part may be smaller.
            ignored: The target that adds nothing; it is negative.

        Raises:
            UserError: a process would have no part of the vocabulary.
        """
        super().__init__()
        if _share(vocabulary, mesh) * (mesh.size() - 1) >= vocabulary:
            raise UserError(
                f"parallel.tp({mesh.size()}) leaves a process without a part of the "
                f"vocabulary({vocabulary})"
            )
        self._group = mesh.get_group()
        self._start = _first(vocabulary, mesh)
        self._ignored = ignored

    def forward(self, logits_PV: Tensor, targets_P: Tensor) -> Tensor:
        """Map this process's logits [P, V] and all targets [P] to a scalar, in fp32 at least."""
        return self.by_position(logits_PV, targets_P).sum()

    def by_position(self, logits_PV: Tensor, targets_P: Tensor) -> Tensor:
        """Map the same to the nats of each position, [P]."""
        logits_PV = logits_PV.to(torch.promote_types(logits_PV.dtype, torch.float32))
        places_P, counted_P = targets_P - self._start, targets_P != self._ignored
        nats_P: Tensor = _VocabularyCrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits_PV, places_P, counted_P, self._group
        )
        return nats_P


class _VocabularyCrossEntropy(torch.autograd.Function):
    """All processes get the nats of each position, and each the gradient of its logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_PV: Tensor, places_P: Tensor, counted_P: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        peak_P = logits_PV.amax(dim=1)
        dist.all_reduce(peak_P, dist.ReduceOp.MAX, group)
        shifted_PV = logits_PV - peak_P.unsqueeze(1)
        here_P = counted_P & (places_P >= 0) & (places_P < logits_PV.shape[1])
        places_P = places_P.where(here_P, 0)
        picked_P = shifted_PV.gather(1, places_P.unsqueeze(1)).squeeze(1).where(here_P, 0)
        exponentials_PV = shifted_PV.exp_()
        sums_2P = torch.stack((exponentials_PV.sum(dim=1), picked_P))
        dist.all_reduce(sums_2P, group=group)
        total_P, target_P = sums_2P
        ctx.save_for_backward(exponentials_PV, total_P, places_P, here_P, counted_P)
        nats_P: Tensor = total_P.log() - target_P
        return nats_P.where(counted_P, 0)

    @staticmethod
    def backward(ctx: Any, scale_P: Tensor) -> Any:
        exponentials_PV, total_P, places_P, here_P, counted_P = ctx.saved_tensors
        weight_P = scale_P * counted_P
        gradient_PV = exponentials_PV * (weight_P / total_P).unsqueeze(1)
        taken_P1 = (weight_P * here_P).unsqueeze(1)
        gradient_PV.scatter_add_(1, places_P.unsqueeze(1), -taken_P1)
        return gradient_PV, None, None, None


class _GatheredInput(ParallelStyle):
    """A module whose first input lies over the processes, and is gathered once for all its layers.

    As torch's `PrepareModuleInput`, but one sample is gathered as a matrix, see `_exchanged`.
    """

    def __init__(self, inputs: Placement) -> None:
        super().__init__()
        self._inputs = inputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _divide(module, Shard(0), device_mesh, self.src_data_rank)  # the sinks of heads
        module.register_forward_pre_hook(partial(self._gather, device_mesh))
        return module

    def _gather(self, mesh: DeviceMesh, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *others = inputs
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, (self._inputs,), run_check=False)
        return _exchanged(first, Replicate()), *others


class _ExpertFeatures(_GatheredInput):
    """Each process has a part of every expert's features, and routes all tokens.

    So each has a part of every gradient that leads out of the experts: the router's, too. The
    output lies over the processes as the input does.
    """

    _whole = ("router", "gate_proj.lora_a", "up_proj.lora_a", "down_proj.lora_b")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, part in module.named_modules():
            by_rows = name.startswith("down_proj")
            lies = Replicate() if name in self._whole else Shard(2 if by_rows else 1)
            _divide(part, lies, device_mesh, self.src_data_rank)
            if by_rows and isinstance(part, ExpertLinear):
                part.bias_factor = 1 / device_mesh.size()
        module.register_forward_hook(partial(self._add_up, device_mesh))
        return super()._apply(module, device_mesh)

    def _gather(
        self, mesh: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        (x_BSD,) = super()._gather(mesh, module, inputs)
        return (x_BSD.to_local(grad_placements=[Partial()]),)

    def _add_up(self, mesh: DeviceMesh, _: nn.Module, __: Any, output_BSD: Tensor) -> Tensor:
        parts = DTensor.from_local(output_BSD, mesh, (Partial(),), run_check=False)
        return _exchanged(parts, self._inputs).to_local()


class _RowwiseParallel(RowwiseParallel):
    """torch's, but sums of one sample are scattered as a matrix, see `_exchanged`."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, _: Any, outputs: DTensor, __: Any
    ) -> Tensor:
        outputs = _exchanged(outputs, *output_layouts)
        return outputs.to_local() if use_local_output else outputs


def _exchanged(x_BSX: DTensor, wanted: Placement) -> DTensor:
    """Return a tensor laid otherwise over the processes, its positions gathered or scattered.

    One sample is exchanged as a matrix [S, X]: its rows lie in memory as they travel, so that
    nothing is copied beside, and torch's pass for `parallel.async_tp` only knows this form.
    """
    (had,) = x_BSX.placements
    if x_BSX.ndim != 3 or x_BSX.shape[0] != 1 or _SEQUENCE not in (had, wanted):
        return x_BSX.redistribute(placements=(wanted,), async_op=True)
    rows = Shard(0) if wanted == _SEQUENCE else wanted
    x_SX = cast("DTensor", x_BSX.flatten(0, 1)).redistribute(placements=(rows,), async_op=True)
    return cast("DTensor", x_SX.view(1, *x_SX.shape))


def _first(vocabulary: int, mesh: DeviceMesh) -> int:
    """Return the first token of this process's part."""
    return _share(vocabulary, mesh) * mesh.get_local_rank()


def _share(vocabulary: int, mesh: DeviceMesh) -> int:
    """Return tokens of a process's part as DTensor divides them; the last one's may be smaller."""
    return -(-vocabulary // mesh.size())


_SEQUENCE = Shard(1)
_HEADS = Shard(2)


def tensor_parallel(part: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Divide a decoder, or a stage of one, in place; its processes have the same weights.

    With targets it gives the loss as before; without, this process's part of the logits. A part
    that reads or gives hidden states has them as [B, S / tp, D] under sequence parallelism.

    Raises:
        UserError: heads or features can't be divided so.
    """
    check_divisible(part.config, mesh.size())
    stream: Placement = _SEQUENCE if sequence_parallel else Replicate()
    # Every process has the same weights: none needs to send them.
    parallelize_module(part, mesh, _plan(part, stream), src_data_rank=None)
    if part.lm_head is not None:
        part.cross_entropy = VocabularyCrossEntropy(mesh, part.config.vocab_size, IGNORED)
    if sequence_parallel:
        part.sequence_shards *= mesh.size()
    part.after_to_empty()  # ties what was divided apart


def _plan(part: Transformer, stream: Placement) -> dict[str, ParallelStyle]:
    """Return the style of each module that this part has."""
    plan: dict[str, ParallelStyle] = {}
    if part.embed_tokens is not None:
        plan["embed_tokens"] = VocabularyEmbedding(stream)
    if part.embed_positions is not None:
        plan["embed_positions"] = ColwiseParallel(output_layouts=stream)
    for number, layer in part.layers.items():
        styles = _block(cast("Block", layer), stream)
        plan |= {f"layers.{number}.{name}": style for name, style in styles.items()}
    if part.lm_head is not None:
        plan["norm"] = Replicated(stream, Replicate())
        plan["lm_head"] = ColwiseParallel()
    return plan


def _block(layer: Block, stream: Placement) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": Replicated(stream, stream),
        "post_attention_layernorm": Replicated(stream, stream),
        # Gathered once for all that read it.
        "self_attn": _GatheredInput(stream),
        "self_attn.o_proj": _RowwiseParallel(output_layouts=stream),
        "self_attn.k_rope_proj": _OfAllHeads(Replicate(), Replicate()),
        "mlp": _ExpertFeatures(stream),
    }
    plan |= {f"self_attn.{each}_proj": ColwiseParallel() for each in ("q", "k", "v", "q_b", "kv_b")}
    latents = (f"self_attn.{x}_a_{y}" for x in ("q", "kv") for y in ("proj", "layernorm"))
    plan |= dict.fromkeys(latents, Replicated(Replicate(), Replicate()))
    for name in ("mlp", "shared_experts"):
        if isinstance(getattr(layer, name), FeedForward):
            plan[name] = _GatheredInput(stream)
            plan |= {f"{name}.{each}_proj": ColwiseParallel() for each in ("gate", "up")}
            plan[f"{name}.down_proj"] = _RowwiseParallel(output_layouts=stream)
    for name in ("attention_out_norm", "mlp_out_norm"):
        plan[name] = Replicated(stream, stream, local=True)
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        plan[name] = Replicated(_HEADS, _HEADS, local=True)
    has = {name for name, each in layer.named_modules() if not isinstance(each, nn.Identity)}
    found = {name: style for name, style in plan.items() if name in has}
    return _with_adapters(layer, found, stream)


def _with_adapters(
    block: Block, plan: dict[str, ParallelStyle], stream: Placement
) -> dict[str, ParallelStyle]:
    """Return the plan with three styles for a layer that has an adapter: its own, A's and B's."""
    found: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        layer = block.get_submodule(name)
        if not isinstance(layer, LoRALinear):
            found[name] = style
            continue
        by_columns = isinstance(style, ColwiseParallel)
        quantized = QuantizedColumns() if by_columns else QuantizedRows(stream)
        found[f"{name}.base"] = quantized if isinstance(layer.base, NF4Linear) else style
        if by_columns or isinstance(style, Replicated):
            whole = Replicated(Replicate(), Replicate())
            found |= {f"{name}.lora_a": whole, f"{name}.lora_b": style}
        else:
            found[f"{name}.lora_a"] = _RowwiseParallel(output_layouts=stream)
            found[f"{name}.lora_b"] = Replicated(stream, stream, local=True)
    return found
