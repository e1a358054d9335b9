"""The training loss: cross-entropy of the next token, without holding all logits at once.

Shape suffixes: P positions of all samples, D model width, V vocabulary.
"""

# ruff: noqa: N803, N806, N812 (names that end in their shape)

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelines.loading.dataloader import IGNORED

CHUNK = 1 << 27  # most logits held at once: half a GiB in fp32


class CrossEntropy(nn.Module):
    """Cross-entropy in nats, summed over the targets and computed in at least fp32.

    A target that is `IGNORED` adds nothing. It is a sum, not a mean, so that micro-batches and
    processes with different numbers of targets add up correctly. It is a module so that it can be
    compiled, or replaced where the vocabulary is split over several processes.
    """

    def forward(self, logits_PV: Tensor, targets_P: Tensor) -> Tensor:
        """Map logits [P, V] and targets [P] to a scalar."""
        logits_PV = logits_PV.to(torch.promote_types(logits_PV.dtype, torch.float32))
        return F.cross_entropy(logits_PV, targets_P, ignore_index=IGNORED, reduction="sum")


def next_token_loss(
    head: nn.Module,
    criterion: nn.Module,
    x_PD: Tensor,
    targets_P: Tensor,
    vocabulary: int,
) -> Tensor:
    """Return the summed loss, computed for chunks of positions with about `CHUNK` logits each.

    Each chunk's gradient is computed with its loss, and its logits are then freed, so nothing is
    computed twice. A batch that fits in one chunk uses plain autograd.

    Args:
        head: Maps [P, D] to [P, V].
        criterion: `CrossEntropy` or its replacement: maps logits [P, V], targets [P] to a sum.
        x_PD: The input of the head.
        targets_P: Token ids, or `IGNORED`.
        vocabulary: V, of the whole head.

    Returns:
        The sum over all positions.
    """
    chunks = math.ceil(len(targets_P) * vocabulary / CHUNK)
    if chunks <= 1:
        return criterion(head(x_PD), targets_P)  # type: ignore[no-any-return]
    if not torch.is_grad_enabled():
        parts = zip(x_PD.chunk(chunks), targets_P.chunk(chunks), strict=True)
        return torch.stack([criterion(head(x), targets) for x, targets in parts]).sum()
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    return _Chunked.apply(head, criterion, x_PD, targets_P, chunks, *weights)  # type: ignore[no-any-return, no-untyped-call]


class _Chunked(torch.autograd.Function):
    """Computes the gradients together with the loss: the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        criterion: nn.Module,
        x_PD: Tensor,
        targets_P: Tensor,
        chunks: int,
        *weights: Tensor,
    ) -> Tensor:
        ctx.dtypes = [weight.dtype for weight in weights]
        # Many small numbers are added to a large sum, so half precision would lose them.
        sums = [
            torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32))
            for each in weights
        ]
        losses, gradients = [], []
        for x, targets in zip(x_PD.chunk(chunks), targets_P.chunk(chunks), strict=True):
            with torch.enable_grad():
                part = x.detach().requires_grad_()
                loss = criterion(head(part), targets)
                gradient, *of_weights = torch.autograd.grad(loss, (part, *weights))
            losses.append(loss.detach())
            gradients.append(gradient)
            for total, each in zip(sums, of_weights, strict=True):
                total.add_(each)
        ctx.save_for_backward(torch.cat(gradients), *sums)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradient, *sums = ctx.saved_tensors
        scaled = [(total * scale).to(dtype) for total, dtype in zip(sums, ctx.dtypes, strict=True)]
        return (None, None, gradient * scale, None, None, *scaled)
