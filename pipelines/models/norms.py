"""Norms, whose results have their inputs' type, also under autocast; they are computed in fp32.

Papers: RMSNorm (Zhang and Sennrich 2019), LayerNorm (Ba et al. 2016).
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pipelines.models.config import DecoderConfig


class RMSNorm(nn.RMSNorm):
    """RMSNorm."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class ZeroCentredRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, as Gemma's: the weight is 0 at first.

    The sum is in fp32 and not kept, so that a small weight in half precision is not rounded away.
    """

    def reset_parameters(self) -> None:
        """Fill the weight with zeros."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            factor = 1 + self.weight.to(wide)
            return F.rms_norm(x.to(wide), self.normalized_shape, factor, self.eps).type_as(x)


class LayerNorm(nn.LayerNorm):
    """LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def build_norm(config: DecoderConfig) -> nn.Module:
    """Build a norm of the residual stream."""
    if config.zero_centred_norms:
        return ZeroCentredRMSNorm(config.width, eps=config.norm_eps)
    norm = RMSNorm if config.norm == "rms" else LayerNorm
    return norm(config.width, eps=config.norm_eps)


def build_head_norm(config: DecoderConfig) -> nn.Module:
    """Build a norm of each head's queries or keys."""
    # Under autocast torch's own computes in fp32 and gives fp32.
    norm = ZeroCentredRMSNorm if config.zero_centred_norms else nn.RMSNorm
    return norm(config.head_width, eps=config.norm_eps)
