"""What training makes smaller."""

# ruff: noqa: N803, N812 (names that end in their shape)

import torch.nn.functional as F
from torch import Tensor

from pipelines.loading.dataloader import IGNORED


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy of the next token: nats, summed over the targets, in fp32 whatever the logits.

    A target that is `IGNORED` adds nothing. A sum and not a mean, so that micro-batches and
    processes with different numbers of targets add up right.
    """
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).float(),
        targets_BS.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
