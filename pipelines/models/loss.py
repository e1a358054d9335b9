"""The training loss: cross-entropy of the next token, without holding all logits at once.

Shape suffixes: P positions of all samples, D model width, V vocabulary, B batch, S sequence, M
documents of a sample.
"""

# ruff: noqa: N803, N806, N812 (names that end in their shape)

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from pipelines.loading.dataloader import IGNORED
from pipelines.models.weights import local

CHUNK = 1 << 27  # most logits held at once: half a GiB in fp32
SLICE = 1 << 24  # most numbers of a weight gradient held beside its sum: they fit a GPU's cache
_TILE = 64  # a GPU's fast kernels take no matrices of other sizes, nor such that begin elsewhere


class Objective(Protocol):
    """Callable that makes a loss, which adds up over batches, of the nats of single positions."""

    def __call__(
        self,
        nats_BS: Tensor,
        targets_BS: Tensor,
        documents_BS: Tensor,
        known_BK: Tensor | None,
    ) -> Tensor:
        """Return the loss.

        Args:
            nats_BS: Of each target, of this process's positions.
            targets_BS: Of the same positions.
            documents_BS: Of the same positions.
            known_BK: What was known of each sample beforehand.
        """


class CrossEntropy(nn.Module):
    """Cross-entropy in nats, summed over the targets and computed in at least fp32.

    A target that is `IGNORED` adds nothing. It is a sum, not a mean, so that micro-batches and
    processes with different numbers of targets add up correctly. It is a module so that it can be
    compiled, or replaced where the vocabulary is split over several processes.
    """

    def forward(self, logits_PV: Tensor, targets_P: Tensor) -> Tensor:
        """Map logits [P, V] and targets [P] to a scalar."""
        return _cross_entropy(logits_PV, targets_P, "sum")

    def by_position(self, logits_PV: Tensor, targets_P: Tensor) -> Tensor:
        """Map logits [P, V] and targets [P] to the nats of each position, [P]."""
        return _cross_entropy(logits_PV, targets_P, "none")


def _cross_entropy(logits_PV: Tensor, targets_P: Tensor, reduction: str) -> Tensor:
    logits_PV = logits_PV.to(torch.promote_types(logits_PV.dtype, torch.float32))
    return F.cross_entropy(logits_PV, targets_P, ignore_index=IGNORED, reduction=reduction)


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
        criterion: `CrossEntropy` or its replacement.
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


def nats_by_position(
    head: nn.Module,
    criterion: Any,
    x_PD: Tensor,
    targets_P: Tensor,
    vocabulary: int,
) -> Tensor:
    """Return the nats of each position, [P], for a loss that is not their sum.

    The arguments are those of `next_token_loss`. Its gradients need the whole loss, so that a
    chunk's logits are computed again in the backward pass.
    """

    def of_chunk(x: Tensor, targets: Tensor) -> Tensor:
        return criterion.by_position(head(x), targets)  # type: ignore[no-any-return]

    rows = _whole_tiles(CHUNK // vocabulary)
    if len(targets_P) <= rows:
        return of_chunk(x_PD, targets_P)
    chunks = zip(torch.split(x_PD, rows), torch.split(targets_P, rows), strict=True)
    return torch.cat([checkpoint(of_chunk, *each, use_reentrant=False) for each in chunks])


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
