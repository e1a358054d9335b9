"""What a GPU's kernels keep and give back, for those that a build of torch for CPUs lacks.

Without them torch would take the formula apart into steps that a GPU never runs, and the dry run
would count their memory.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pipelines.models import attention
from pipelines.models.loss import CrossEntropy
from pipelines.models.transformer import Transformer
from pipelines.parallel import parallelize
from pipelines.planning.hardware import Hardware
from pipelines.training import optimizer

_FLASH = (8, 0)  # the compute capability that FlashAttention needs
_WIDEST = 256  # features of a head that it takes
_BLOCK = 128  # positions of a block of a mask
_aten = torch.ops.aten


@contextmanager
def fake_kernels(hardware: Hardware) -> Iterator[None]:
    """Let attention, norms and compiled blocks behave as on `hardware`, within the block."""
    aten: Any = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
    aten.impl("_fused_rms_norm", _rms_norm)
    compile_blocks = partial(_compile, parallelize.compile_blocks)
    flash = (hardware.capability or (0, 0)) >= _FLASH
    attend = _attention(F.scaled_dot_product_attention, flash=flash)
    with ExitStack() as stack:
        for each in (
            patch.object(F, "scaled_dot_product_attention", attend),
            patch.object(attention, "_compiled", _uncompiled),
            patch.object(parallelize, "compile_blocks", compile_blocks),
            patch.object(optimizer, "compiled_update", lambda: optimizer.update_in_8_bits),
            torch._functorch.config.patch(graphsafe_rng_functionalization=False),
        ):
            stack.enter_context(each)
        yield
    aten._destroy()


def _compile(compile_blocks: Any, part: Transformer, options: Any) -> None:  # noqa: ARG001
    """Compile blocks; the loss, where it would be compiled, is one kernel as Inductor makes it.

    Inductor's options are left out: what overlaps in it sends the same bytes.
    """
    if isinstance(part.cross_entropy, CrossEntropy):
        part.cross_entropy = _FusedCrossEntropy()
    compile_blocks(part, backend=_as_inductor)


def _as_inductor(graph: GraphModule, inputs: list[Tensor]) -> Any:
    """Take a graph apart as Inductor does, and run its kernels on no GPU."""
    from torch._inductor.decomposition import select_decomp_table

    run = aot_autograd(
        fw_compiler=_fused,
        bw_compiler=_fused,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    return run(graph, inputs)


def _fused(graph: GraphModule, _: Any) -> Any:
    """Let steps number by number, and what they are summed up to, be one kernel as in Inductor.

    It writes out only what others read, and reads until then what it is made of.
    """
    inlined: dict[Node, list[Node]] = {}  # and what they read
    for node in graph.graph.nodes:
        if not _is_fused(node):
            continue
        read = [each for found in node.all_input_nodes for each in inlined.get(found, [found])]
        if node.users and all(map(_is_fused, node.users)):
            inlined[node] = read
        elif not inlined.keys().isdisjoint(node.all_input_nodes):
            made = node.meta["val"]
            like = (made.shape, made.stride(), made.dtype, made.device)
            node.target, node.args, node.kwargs = _one_kernel, (like, *read), {}
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return make_boxed_func(graph.forward)


def _is_fused(node: Node) -> bool:
    """Return whether Inductor puts an operator into one kernel with those before and after it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    tags = node.target.tags
    fused = torch.Tag.pointwise in tags or torch.Tag.reduction in tags or node.target.is_view
    fused |= node.target is torch.ops.aten.full.default
    return fused and isinstance(node.meta.get("val"), Tensor)


def _one_kernel(like: Any, *_: Any) -> Tensor:
    shape, stride, dtype, device = like
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


class _FusedCrossEntropy(nn.Module):
    """Keeps the logits, and makes nothing else of their size but their gradient."""

    def forward(self, logits: Tensor, targets: Tensor) -> Any:
        """Map logits [P, V] and targets [P] to a scalar."""
        return self.by_position(logits, targets).sum()

    def by_position(self, logits: Tensor, targets: Tensor) -> Any:
        """Map logits [P, V] and targets [P] to [P]."""
        return _Fused.apply(logits, targets)  # type: ignore[no-untyped-call]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        sums = logits.new_empty(len(logits), dtype=torch.float32)  # of exponentials
        ctx.save_for_backward(logits, targets, sums)
        return torch.zeros_like(sums)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None


def _rms_norm(x: Tensor, shape: Any, _weight: Any, _eps: Any) -> tuple[Tensor, Tensor]:
    """Return a result and the number that the kernel keeps for each row."""
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


def _attention(by_formula: Any, *, flash: bool) -> Any:
    """Return attention by the kernel that PyTorch chooses on a GPU, the first that can: flash,
    efficient, or else the formula, which writes out all weights of attention.
    """

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        half = q.dtype in (torch.bfloat16, torch.float16)
        if flash and half and attn_mask is None and q.shape[-1] <= _WIDEST:
            kernel = _aten._scaled_dot_product_flash_attention
            return kernel(q, k, v, 0.0, is_causal, scale=scale)[0]
        if not enable_gqa:
            return _aten._scaled_dot_product_efficient_attention(
                q, k, v, attn_mask, True, 0.0, is_causal, scale=scale
            )[0]
        return by_formula(
            q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return attend


def _uncompiled(name: str) -> Any:
    return {"flex_attention": flex_attention, "create_block_mask": _block_mask}[name]


def _block_mask(
    visible: Any, batch: int | None, _heads: None, queries: int, keys: int, device: torch.device
) -> BlockMask:
    """Return a mask of the right size without looking at any position."""
    rows, columns = -(-queries // _BLOCK), -(-keys // _BLOCK)
    numbers = torch.empty((batch or 1, 1, rows), dtype=torch.int32, device=device)
    indices = torch.empty((batch or 1, 1, rows, columns), dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        numbers,
        indices,
        BLOCK_SIZE=_BLOCK,
        mask_mod=visible,
        seq_lengths=(queries, keys),
    )
