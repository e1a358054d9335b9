"""The training loss: cross-entropy of the next token, without holding all logits at once.

Shape suffixes: P positions of all samples, D model width, V vocabulary.
"""

# ruff: noqa: N803, N806, N812 (names that end in their shape)

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipelines.loading.dataloader import IGNORED
from pipelines.models.weights import local

CHUNK = 1 << 27  # most logits held at once: half a GiB in fp32
SLICE = 1 << 24  # most numbers of a weight gradient held beside its sum: they fit a GPU's cache
_TILE = 64  # a GPU's fast kernels take no matrices of other sizes, nor such that begin elsewhere


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
    """Return the summed loss, computed for chunks of positions with at most `CHUNK` logits each.

    Each chunk's gradient is computed with its loss, and its logits are then freed, so nothing is
    computed twice. What a chunk adds to the weight's gradient goes into the sum of all chunks a
    slice of the vocabulary at a time; there is no second tensor of the weight's size. A batch that
    fits in one chunk uses plain autograd.

    Args:
        head: A linear layer from [P, D] to [P, V], or this process's part of one.
        criterion: `CrossEntropy` or its replacement: maps logits [P, V], targets [P] to a sum.
        x_PD: The input of the head.
        targets_P: Token ids, or `IGNORED`.
        vocabulary: V, of the whole head.

    Returns:
        The sum over all positions.
    """
    rows = _whole_tiles(CHUNK // vocabulary)
    if len(targets_P) <= rows:
        return criterion(head(x_PD), targets_P)  # type: ignore[no-any-return]
    if not torch.is_grad_enabled():
        parts = zip(torch.split(x_PD, rows), torch.split(targets_P, rows), strict=True)
        return torch.stack([criterion(head(x), targets) for x, targets in parts]).sum()
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    return _Chunked.apply(head, criterion, x_PD, targets_P, rows, *weights)  # type: ignore[no-any-return, no-untyped-call]


def _whole_tiles(rows: int) -> int:
    """Round down to whole tiles, where it is more than one."""
    return rows // _TILE * _TILE or max(1, rows)


class _Chunked(torch.autograd.Function):
    """Computes the gradients together with the loss: the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        criterion: nn.Module,
        x_PD: Tensor,
        targets_P: Tensor,
        rows: int,
        *weights: Tensor,
    ) -> Tensor:
        ctx.dtypes = [weight.dtype for weight in weights]
        # Many small numbers are added to a large sum, so half precision would lose them.
        sums = [
            torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32))
            for each in weights
        ]
        losses, gradients = [], []
        for x, targets in zip(torch.split(x_PD, rows), torch.split(targets_P, rows), strict=True):
            with torch.enable_grad():
                part = x.detach().requires_grad_()
                logits = head(part)
                loss = criterion(logits, targets)
                edges = get_gradient_edge(logits), get_gradient_edge(part)
                del logits  # so that the gradient may have its memory
                of_logits, gradient = torch.autograd.grad(loss, edges)
            losses.append(loss.detach())
            gradients.append(gradient)
            for total in sums:
                _add_gradient(total, of_logits, x)
        ctx.save_for_backward(torch.cat(gradients), *sums)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradient, *sums = ctx.saved_tensors
        scaled = [
            torch.empty_like(total, dtype=dtype)
            for total, dtype in zip(sums, ctx.dtypes, strict=True)
        ]
        for total, into in zip(sums, scaled, strict=True):
            torch.mul(local(total), local(scale), out=local(into))
        return (None, None, gradient * scale, None, None, *scaled)


def _add_gradient(total: Tensor, of_logits_PV: Tensor, x_PD: Tensor) -> None:
    """Add a chunk's gradient to that of a weight [V, D] or bias [V], without a tensor of its size.

    The products are of the logits' precision, their sum of the total's.
    """
    total, of_logits_PV, x_PD = map(local, (total, of_logits_PV, x_PD))
    if total.dim() == 1:
        total.add_(of_logits_PV.sum(dim=0))
        return
    rows = _whole_tiles(SLICE // total.shape[1])
    x_PD = x_PD.to(of_logits_PV.dtype)
    for part_VD, gradient_PV in zip(
        torch.split(total, rows), torch.split(of_logits_PV, rows, dim=1), strict=True
    ):
        part_VD.add_(gradient_PV.T @ x_PD)
