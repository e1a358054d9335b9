"""Activation checkpointing: what of a block is computed again in the backward pass, not kept.

Papers: sublinear memory (Chen et al. 2016); selective recomputation (Korthikanti et al. 2022).
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
# Dear to compute again: matrix products, attention, sums over processes and their exchanges.
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
    _c10d.all_reduce.default,
    _c10d.all_to_all_single.default,
    _c10d.reduce_scatter_tensor.default,
}


def checkpoint_activations(
    blocks: Iterable[nn.Module], mode: Literal["none", "selective", "full"]
) -> None:
    """Make each block keep less between its forward and its backward pass.

    A block's `forward` is replaced and the block is not wrapped: parameters keep their names, and
    hooks on it, such as FSDP's, run once. Losses and gradients stay the same to the bit.

    Args:
        blocks: Modules that depend on nothing but their inputs, parameters and random numbers.
        mode: `full` keeps a block's inputs; `selective` also the outputs of matrix products,
            attention, sums over processes and their exchanges, so that only what is cheap is
            computed again.
    """
    if mode == "none":
        return
    further = {"context_fn": _keep_dear} if mode == "selective" else {}
    for block in blocks:
        block.forward = _checkpointed(block.forward, further)


def _checkpointed(forward: Any, further: dict[str, Any]) -> Any:
    def recomputed(*arguments: Any, **named: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **further, **named)

    return recomputed


def _policy(_context: Any, operator: Any, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
    if operator in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_keep_dear = partial(create_selective_checkpoint_contexts, _policy)
