"""Where a token stands: rotary positions, and positions within a document.

Shape suffixes: B batch, S sequence, N heads, H head width, R features that are turned; 2 for
cosine and sine.

Papers: rotary positions (Su et al. 2021); their scaling as in Llama 3.1 (Meta 2024, section 3.4.1).
"""

# ruff: noqa: N803, N806 (names that end in their shape)

import math

import torch
from torch import Tensor

from pipelines.models.config import DecoderConfig, RopeScaling


def rotary_table(config: DecoderConfig) -> Tensor:
    """Cosine and sine of each position's rotation, [2, context, R] in fp32 on the CPU."""
    width = config.rotary_width
    halves = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    frequencies = 1.0 / (config.rope_theta**halves)
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    numbers = torch.arange(config.context_length, dtype=torch.float32, device="cpu")
    angles = torch.outer(numbers, frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow rotations are slowed by `factor`, fast ones are kept, and between them it is blended."""
    context = scaling.original_max_position_embeddings
    turns = context * frequencies / (2 * math.pi)  # within the first context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x_BNSH: Tensor, table_2SR: Tensor) -> Tensor:
    """Turn features i and i + R/2 by the position's angle: the layout of Hugging Face's Llama.

    Features from R on stay as they are. It is computed in the table's precision.
    """
    cos_SR, sin_SR = table_2SR.unbind()
    width = cos_SR.shape[-1]
    rest_BNSH = x_BNSH[..., width:]
    x_BNSR = x_BNSH[..., :width]
    left, right = x_BNSR.chunk(2, dim=-1)
    turned_BNSR = x_BNSR * cos_SR + torch.cat((-right, left), dim=-1) * sin_SR
    turned_BNSR = turned_BNSR.type_as(x_BNSH)
    return torch.cat((turned_BNSR, rest_BNSH), dim=-1) if rest_BNSH.shape[-1] else turned_BNSR


def positions(tokens_BS: Tensor, documents_BS: Tensor | None) -> Tensor:
    """How far each token is from the first of its document, [B, S]; without documents, [1, S]."""
    numbers_1S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).unsqueeze(0)
    if documents_BS is None:
        return numbers_1S
    begins_BS = documents_BS.diff(dim=1, prepend=documents_BS[:, :1] - 1) != 0
    return numbers_1S - numbers_1S.where(begins_BS, 0).cummax(dim=1).values
