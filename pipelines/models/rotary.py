"""Rotary positions.

Shape suffixes: B batch, S sequence, N heads, H head width, R rotated features, 2 cosine and sine.

Papers: rotary positions (Su et al. 2021); linear scaling (Chen et al. 2023); scaling as in Llama
3.1 (Meta 2024, section 3.4.1); YaRN (Peng et al. 2023, sections 3.2 to 3.4).
"""

import math

import torch
from torch import Tensor

from pipelines.models.config import DecoderConfig, RopeScaling, Yarn

# ruff: noqa: N803, N806 (names that end in their shape)


def rotary_table(config: DecoderConfig, *, local: bool = False) -> Tensor:
    """Return the cosine and sine of each position's rotation, [2, context, R], fp32, on the CPU.

    Args:
        config: The model's.
        local: Of the layers with a window, if these have a `local_rope_theta`.
    """
    numbers = torch.arange(config.context_length, dtype=torch.float32, device="cpu")
    angles = torch.outer(numbers, rotary_frequencies(config, local=local))
    angles = torch.cat((angles, angles), dim=-1)
    table = torch.stack((angles.cos(), angles.sin()))
    if isinstance(scaling := config.rope_scaling, Yarn):
        stretched, share, of_scores = scaling.stretch(), scaling.mscale, scaling.mscale_all_dim
        if share and of_scores:
            stretched = scaling.stretch(share) / scaling.stretch(of_scores)
        table *= scaling.attention_factor or stretched
    return table


def rotary_frequencies(config: DecoderConfig, *, local: bool = False) -> Tensor:
    """Return by how much each pair of features turns from token to token, [R/2], fp32, CPU."""
    width = config.rotary_width
    halves = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    if local and config.local_rope_theta is not None:
        return 1.0 / (config.local_rope_theta**halves)
    frequencies = 1.0 / (config.rope_theta**halves) / config.rope_divisor
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling, config.rope_theta)
    return frequencies


def _scaled(frequencies: Tensor, scaling: RopeScaling | Yarn, theta: float) -> Tensor:
    """Divide slow frequencies by `factor`, keep fast ones, and blend the two in between."""
    context = scaling.original_max_position_embeddings
    if isinstance(scaling, Yarn):  # evenly from pair to pair
        pairs = torch.arange(len(frequencies), device="cpu")
        bounds = (2 * math.pi * each for each in (scaling.beta_fast, scaling.beta_slow))
        low, high = (len(pairs) * math.log(context / each, theta) for each in bounds)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(pairs) - 1)
        kept = 1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    else:  # evenly by their full turns within the original context
        turns = context * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x_BNSH: Tensor, table_2SR: Tensor, neighbours: bool = False) -> Tensor:
    """Rotate features i and i + R/2 by the position's angle, the layout of Hugging Face's Llama.

    Features from R on stay unchanged. The rotation is computed in the table's precision. Where
    neighbours are the pairs, the result has their first features before their second ones: the
    products of queries and keys are the same.
    """
    cos_SR, sin_SR = table_2SR.unbind()
    width = cos_SR.shape[-1]
    rest_BNSH = x_BNSH[..., width:]
    x_BNSR = x_BNSH[..., :width]
    if neighbours:
        x_BNSR = torch.cat((x_BNSR[..., ::2], x_BNSR[..., 1::2]), dim=-1)
    left, right = x_BNSR.chunk(2, dim=-1)
    turned_BNSR = x_BNSR * cos_SR + torch.cat((-right, left), dim=-1) * sin_SR
    turned_BNSR = turned_BNSR.type_as(x_BNSH)
    return torch.cat((turned_BNSR, rest_BNSH), dim=-1) if rest_BNSH.shape[-1] else turned_BNSR
