"""`varlen_attn` on packed documents: a run's checks, and its time beside FlexAttention.

On Hopper also that of FlashAttention 3, where its package is installed.

The fake has the kernels of a CPU, and a mask in FlexAttention's place.
"""

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipelines.models.attention import Mask, attend, attention_mask, sequences
from pipelines.models.presets import preset
from pipelines.training.attention_choice import (
    _activated,
    _Problem,
    _why_it_differs,
    _why_no_flash_3,
)
from tests.gpu_acceptance.acceptance_parts import Outcome, Place

_SHAPE = replace(preset("llama3-8b"), layers=1)
_ROWS, _LENGTH, _DOCUMENTS, _TIMES = 4, 4096, 16, 20


def packed(place: Place) -> Outcome:
    """Whether the result is FlexAttention's, with and without a window, and how long both take."""
    if place.fake:
        import tests.varlen_on_cpu  # noqa: F401
    elif torch.__version__ < "2.13":
        _take_groups()
    device = torch.device(place.device)
    windows = (None, 100)
    wrong = [
        why
        for window in windows
        if (why := _why_it_differs(_Problem.drawn(_SHAPE, torch.bfloat16, device, window)))
    ]
    found = {} if wrong else _seconds(place, device)
    ratio = found["flex"] / found["varlen"] if found else None
    problem = _Problem.drawn(_SHAPE, torch.bfloat16, device, None)
    why = "no device" if place.fake else _why_no_flash_3(device, deterministic=False)
    if found and not why and not (why := _activated(problem)):
        found["FlashAttention 3"] = _seconds(place, device)["varlen"]
    limits = wrong[0] if wrong else f"FlashAttention 3: {why or 'right'}"
    reached = ratio is not None and ratio >= 1
    return Outcome(ratio or 0.0, "x flex's speed", ratio, reached, limits, {"seconds": found})


def _take_groups() -> None:
    """Let `varlen_attn` of an earlier torch take fewer keys than queries, as that of 2.13 does."""
    from torch.nn.attention import varlen

    earlier = varlen.varlen_attn

    def varlen_attn(
        q: Tensor, k: Tensor, v: Tensor, *rest: Any, enable_gqa: bool, **named: Any
    ) -> Any:
        group = q.shape[1] // k.shape[1] if enable_gqa else 1
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return earlier(q, k, v, *rest, **named)

    varlen.varlen_attn = varlen_attn


def _seconds(place: Place, device: torch.device) -> dict[str, float]:
    """The seconds of one attention, forward and backward, by what computes it."""
    rows, length, times = (1, 128, 1) if place.fake else (_ROWS, _LENGTH, _TIMES)
    documents = torch.arange(length, device=device) * _DOCUMENTS // length
    documents = documents.to(torch.int32).expand(rows, -1)
    masks: dict[str, Mask] = {
        "flex": attention_mask(documents, length, None, device),
        "varlen": sequences(documents, (rows, length), None, _DOCUMENTS, device),
    }
    return {name: _timed(mask, rows, length, times, device) for name, mask in masks.items()}


def _timed(mask: Mask, rows: int, length: int, times: int, device: torch.device) -> float:
    kind = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (
        torch.randn(rows, length, heads, _SHAPE.head_width, **kind).transpose(1, 2)
        for heads in (_SHAPE.heads, _SHAPE.kv_heads, _SHAPE.kv_heads)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def work() -> None:
        torch.autograd.grad(attend(*leaves, mask).sum(), leaves)

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    work()  # compiles
    began = wait()
    for _ in range(times):
        work()
    return (wait() - began) / times
