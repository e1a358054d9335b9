"""How fast attention is on a device, from its kernels' own published figures; no torch here.

Attention's rate is another than that of matrix products: it grows with the sample, and on an H100
FlashAttention 2 reaches a third of the peak where products reach two. The figures count what is
done: half of the scores, as the others are in the future, and in the backward pass 2.5 times as
many operations as in the forward pass, since scores are computed anew.

Sources: Dao 2023 (FlashAttention-2), figures 4 and 7 (forward and backward pass together, causal),
as in `assets/flash2_{a100,h100}_fwd_bwd_benchmark.png` of github.com/Dao-AILab/flash-attention at
0251105a2fb19d2957484b7f023cd8c115286ced.
"""

import math
from typing import Literal

from pipelines.models.config import DecoderConfig
from pipelines.planning.hardware import AttentionFigures

Kernel = Literal["flash-1", "flash-2"]
FLASH_1: Kernel = "flash-1"  # with which the tables were measured that MFUs are from
FLASH_2: Kernel = "flash-2"  # which torch has

FORWARD_SHARE = 1 / 3.5  # of both passes' operations: one of 1 + 2.5

_SHORTEST = 512
# TFLOP/s with samples of 512, 1k, 2k, 4k, 8k and 16k tokens, by width of a head. FlashAttention 1
# on an A100 is the one written in Triton; for an H100 there is only the one in CUDA.
_FIGURES: dict[Kernel, dict[AttentionFigures, dict[int, tuple[int, ...]]]] = {
    "flash-1": {
        "a100": {64: (59, 75, 79, 76, 79, 80), 128: (50, 61, 68, 74, 78, 80)},
        "h100": {64: (104, 123, 136, 138, 149, 156), 128: (98, 109, 108, 126, 135, 137)},
    },
    "flash-2": {
        "a100": {64: (88, 119, 140, 156, 165, 171), 128: (99, 133, 155, 173, 182, 189)},
        "h100": {64: (141, 192, 232, 257, 273, 284), 128: (163, 221, 265, 294, 308, 328)},
    },
}
_PEAKS: dict[AttentionFigures, float] = {"a100": 312.0, "h100": 989.4}
# The Triton kernel that LLM Foundry pinned is later than the one in the figures. Fitted on its
# rows of A100 with 80 GB.
_PINNED = 1.2


def attention_flops(config: DecoderConfig, length: int) -> float:
    """Operations a token in both passes, as the figures count them; windows are not cut."""
    forward = 4 * config.layers * length * config.heads * config.head_width / 2
    return forward / FORWARD_SHARE


def attention_share(
    length: int, head_width: int, figures: AttentionFigures, kernel: Kernel = FLASH_2
) -> float:
    """The part of a device's peak in half precision that `attention_flops` run at.

    Args:
        length: Of a sample, in tokens; longer ones than were measured are as fast as the longest.
        head_width: Of one head.
        figures: Whose: the device's own, or those of the one that it resembles.
        kernel: That computes it.
    """
    rates = _FIGURES[kernel][figures][64 if head_width < 96 else 128]
    at = min(max(0.0, math.log2(length / _SHORTEST)), len(rates) - 1)
    below = min(int(at), len(rates) - 2)
    rate = rates[below] + (at - below) * (rates[below + 1] - rates[below])
    return rate * (_PINNED if kernel == FLASH_1 else 1.0) / _PEAKS[figures]
