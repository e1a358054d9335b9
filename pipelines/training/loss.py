"""What training makes smaller."""

# ruff: noqa: N803, N812 (names that end in their shape)

import torch.nn.functional as F
from torch import Tensor


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy of the next token: nats, summed over all tokens, in fp32 whatever the logits.

    A sum and not a mean, so that micro-batches and processes of different sizes add up right.
    """
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), reduction="sum")
