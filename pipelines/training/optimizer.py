"""The optimizer and its learning rate."""

import math
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from pipelines.core.recipe_training import Train
from pipelines.models.parallelize import Parallelized
from pipelines.training.muon import Muon


def build_optimizer(model: Parallelized, train: Train) -> Optimizer:
    """AdamW, or Muon for the matrices of blocks; only matrices decay, as norms need not be small.

    State is made in the weights' precision, for what this process updates.
    """
    trained = model.trained()
    matrices = {}
    if train.optimizer == "muon":
        matrices = {n: each for n, each in trained.items() if "layers." in n and each.ndim == 2}
    others = [each for name, each in trained.items() if name not in matrices]
    optimizer: Optimizer = (adamw := _adamw(others, train))
    if matrices:
        hidden = matrices.values()
        optimizer = Muon(hidden, adamw, lr=train.lr, weight_decay=train.weight_decay)
    model.attach(optimizer)
    return optimizer


def _adamw(parameters: Iterable[nn.Parameter], train: Train) -> AdamW:
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        # A kernel updates many tensors at once, but only those that lie over one mesh.
        key = parameter.ndim >= 2, getattr(parameter, "device_mesh", None)
        groups.setdefault(key, []).append(parameter)
    decay = {True: train.weight_decay, False: 0.0}
    return AdamW(
        [
            {"params": group, "weight_decay": decay[is_matrix]}
            for (is_matrix, _), group in groups.items()
        ],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        fused=True,
    )


def learning_rate(step: int, train: Train) -> float:
    """The rate of a step from 0: linear warm-up to `lr`, then half a cosine to its `min_lr_ratio`.

    It depends on the step alone, so a resumed run goes on as if never stopped.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * cosine)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Use `rate` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
