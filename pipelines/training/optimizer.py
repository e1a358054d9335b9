"""The optimizer, AdamW or Muon, and its learning rate.

Muon moves hidden matrices along the orthogonalised momentum, and other weights by AdamW.
Sources: Jordan et al. 2024, "Muon"; Liu et al. 2025, "Muon is Scalable for LLM Training", whose
scale of the update lets both parts share AdamW's learning rate and weight decay. `torch.optim.Muon`
takes one matrix at a time, and a DTensor's shards one product at a time; here matrices of the same
shape are multiplied together, and each is gathered only once.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer

from pipelines.models.weights import whole
from pipelines.parallel.parallelize import Parallelized
from pipelines.recipe.training_section import Train

MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's quintic polynomial, steepest at zero
_ITERATIONS = 5
_RMS = 0.2  # the root mean square of AdamW's usual update
_TOGETHER = 1 << 27  # numbers to orthogonalise at once: each copy takes 256 MiB in bf16


class Muon(Optimizer):
    """Muon and AdamW as one optimizer; `param_groups` and `state` hold those of both.

    Attributes:
        found_inf: A scalar on the weights' device. If it is 1.0, `step` changes nothing.
    """

    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True  # as of a fused AdamW

    def __init__(
        self, matrices: Iterable[nn.Parameter], others: AdamW, *, lr: float, weight_decay: float
    ) -> None:
        """Keep the parameters that each part updates.

        Args:
            matrices: Two-dimensional parameters, whole or DTensors.
            others: Has the other parameters; it is part of this optimizer from now on.
            lr: The learning rate of the matrices; comparable to AdamW's.
            weight_decay: The weight decay of the matrices.
        """
        hidden = {"params": list(matrices), "lr": lr, "weight_decay": weight_decay, "muon": True}
        super().__init__([hidden, *others.param_groups], {"muon": False})
        self._others = others

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a closure is not supported."""
        if closure is not None:
            raise ValueError("Muon.step takes no closure")
        self._others.state = self.state
        self._others.param_groups = [group for group in self.param_groups if not group["muon"]]
        self._others.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._others.step()
        for group in self.param_groups:
            if group["muon"]:
                for matrices in _alike(group["params"]):
                    self._update(matrices, group["lr"], group["weight_decay"])

    def _update(self, matrices: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        gradients = [(each, each.grad) for each in matrices if each.grad is not None]
        directions = torch.stack([_wide(self._direction(*each)) for each in gradients])
        scale = _RMS * math.sqrt(max(matrices[0].shape))
        for matrix, update in zip(matrices, orthogonalised(directions), strict=True):
            lying = update.T if matrix.shape[0] > matrix.shape[1] else update
            new = matrix * (1 - lr * weight_decay)
            new.add_(_laid_like(lying.to(matrix.dtype), matrix), alpha=-lr * scale)
            matrix.copy_(self._unless_bad(new, matrix))

    def _unless_bad(self, new: Tensor, old: Tensor) -> Tensor:
        """Return `new`, or `old` in a step that is left out; 0 times NaN would be NaN."""
        return new if self.found_inf is None else torch.where(self.found_inf.bool(), old, new)

    def _direction(self, matrix: nn.Parameter, gradient: Tensor) -> Tensor:
        """Update the momentum, and return Nesterov's direction as a whole bf16 matrix."""
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        gradient = self._unless_bad(gradient, state["momentum"])  # which then stays as it is
        state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        direction = gradient.lerp(state["momentum"], MOMENTUM).bfloat16()
        return whole(direction)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Bring singular values near 1 (0.7 to 1.2) by the Newton-Schulz iteration.

    Args:
        matrices: [number, rows, columns], with at most as many rows as columns.
    """
    a, b, c = _COEFFICIENTS
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _alike(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters with gradients, in groups of one shape (or transposed) and limited size."""
    shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            shapes.setdefault(tuple(sorted(parameter.shape)), []).append(parameter)
    for shape, matrices in shapes.items():
        together = max(1, _TOGETHER // math.prod(shape))
        for start in range(0, len(matrices), together):
            yield matrices[start : start + together]


def _wide(matrix: Tensor) -> Tensor:
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _laid_like(matrix: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's part of `matrix`, which is the same on all processes."""
    if not isinstance(parameter, DTensor):
        return matrix
    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(matrix, mesh, [Replicate()] * mesh.ndim, run_check=False)
    # Offloaded weights are on the CPU, not on the mesh's device.
    return everywhere.redistribute(placements=parameter.placements).to(parameter.device)


def build_optimizer(model: Parallelized, train: Train) -> Optimizer:
    """Build AdamW, or Muon for the blocks' matrices; only matrices have weight decay.

    Norm weights need not be small, so they do not decay. The optimizer's state has the weights'
    precision, and covers what this process updates.
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
        # A fused kernel updates many tensors at once, but only tensors of the same mesh.
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
    """Return the learning rate of a step, counted from 0.

    It warms up linearly to `lr`, then falls by half a cosine to `lr` times `min_lr_ratio`. It
    depends only on the step, so a resumed run goes on as if it had never stopped.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * cosine)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
