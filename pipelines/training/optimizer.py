"""AdamW and its learning rate."""

import math

import torch

from pipelines.core.recipe_training import Train
from pipelines.models.parallelize import Parallelized


def build_optimizer(model: Parallelized, train: Train) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only, as norms have no reason to be small."""
    parameters = model.parameters()
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)


def learning_rate(step: int, train: Train) -> float:
    """The rate of a step from 0: linear warm-up to `lr`, then half a cosine to its `min_lr_ratio`.

    It depends on the step alone, so a resumed run goes on as if never stopped.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
