"""The loss over the whole validation split, for both contenders of `shakespeare`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TOGETHER = 128  # blocks


@torch.no_grad()
def validate(folder: Path, block: int, nats: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Nats a character, in consecutive blocks.

    Args:
        folder: With `validation.bin`.
        block: Its length.
        nats: Of inputs and targets, both [blocks, block], summed.
    """
    ids = torch.from_numpy(np.fromfile(folder / "validation.bin", np.uint16).astype(np.int64))
    length = (len(ids) - 1) // block * block
    inputs, targets = ids[:length].view(-1, block), ids[1 : length + 1].view(-1, block)
    parts = zip(inputs.split(TOGETHER), targets.split(TOGETHER), strict=True)
    return sum(nats(*each).item() for each in parts) / length
