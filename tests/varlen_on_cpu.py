"""`varlen_attn` on a CPU, for which torch has no kernel: each sequence by itself, as its page says.

Importing this gives torch the kernels.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.attention.varlen  # makes the operators
import torch.nn.functional as F
from torch import Tensor

calls = {"forward": 0, "backward": 0}


def seen(length: int, window: list[int]) -> Tensor:
    """What each token sees: so many before and after it, or all where that is -1."""
    before, after = (length if each < 0 else each for each in window)
    places = torch.arange(length)
    ahead = places - places.unsqueeze(1)
    return (ahead <= after) & (ahead >= -before)


def each_sequence(bounds_C: Tensor, *rows_T: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each sequence's rows, with heads before tokens and as many key-value heads as heads."""
    heads = rows_T[0].shape[1]
    for begin, end in pairwise(bounds_C.tolist()):
        parts = (x[begin:end].transpose(0, 1) for x in rows_T)
        yield tuple(x.repeat_interleave(heads // len(x), dim=0) for x in parts)


def _forward(q, k, v, bounds_q, bounds_k, max_q, max_k, *rest):
    _is_causal, scale, window, *_ = rest
    calls["forward"] += 1
    assert bounds_q.dtype == torch.int32
    assert torch.equal(bounds_q, bounds_k)
    assert max_q == max_k >= bounds_q.diff().max()
    outs = [
        F.scaled_dot_product_attention(
            *operands, attn_mask=seen(operands[0].shape[1], window), scale=scale
        )
        for operands in each_sequence(bounds_q, q, k, v)
    ]
    sums = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    rng = torch.empty(2, dtype=torch.uint64)
    return torch.cat(outs, dim=1).transpose(0, 1).contiguous(), sums, rng


def _backward(gradient, q, k, v, out, _sums, bounds, *rest):
    """By hand, as autograd records nothing in an operator."""
    calls["backward"] += 1
    scale, window, found = rest[-2] or q.shape[-1] ** -0.5, rest[-1], []
    for q_NSH, k_NSH, v_NSH, d_NSH, o_NSH in each_sequence(bounds, q, k, v, gradient, out):
        scores = (q_NSH @ k_NSH.mT * scale).float()
        weights = scores.masked_fill(~seen(scores.shape[1], window), -torch.inf).softmax(-1)
        towards = d_NSH.float() @ v_NSH.float().mT
        towards = weights * (towards - (d_NSH * o_NSH).float().sum(-1, keepdim=True)) * scale
        found.append(
            (towards @ k_NSH.float(), towards.mT @ q_NSH.float(), weights.mT @ d_NSH.float())
        )
    whole = (torch.cat(parts, dim=1).transpose(0, 1) for parts in zip(*found, strict=True))
    return tuple(
        grown.unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype).contiguous()
        for grown, x in zip(whole, (q, k, v), strict=True)
    )


torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", _forward)
torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", _backward)
