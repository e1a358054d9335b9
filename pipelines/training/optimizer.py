"""The optimizer: AdamW, or one with its own rule for hidden matrices.

Muon moves hidden matrices along the orthogonalised momentum, and other weights by AdamW.
Sources: Jordan et al. 2024, "Muon"; Liu et al. 2025, "Muon is Scalable for LLM Training", whose
scale of the update lets both parts share AdamW's learning rate and weight decay. `torch.optim.Muon`
takes one matrix at a time, and a DTensor's shards one product at a time; here matrices of the same
shape are multiplied together, each is gathered only once, and replicas share the work.

AdamW in 8 bits keeps the moments of hidden matrices as one byte a number, and a scale for each
block of numbers. Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
torchao and bitsandbytes do the same. They keep it in types of their own, which can't be saved as
safetensors nor divided anew; here codes and scales are plain tensors, divided as the weight is.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer

from pipelines.models.weights import local, whole
from pipelines.parallel.division import moments_block
from pipelines.parallel.mesh import Mesh
from pipelines.parallel.parallelize import Parallelized
from pipelines.recipe.training_section import Train
from pipelines.training.paged_moments import PagedAdamW

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's quintic polynomial, steepest at zero
_ITERATIONS = 5
_RMS = 0.2  # the root mean square of AdamW's usual update
_TOGETHER = 1 << 27  # numbers to orthogonalise at once: each copy takes 256 MiB in bf16
_EPSILON = 1e-8  # as of torch's AdamW
_AT_ONCE = 1 << 22  # numbers whose moments are decoded at once: each copy takes 16 MiB


class HiddenAndOthers(Optimizer):
    """Updates hidden matrices by a rule of its own and other weights by AdamW, as one optimizer.

    `param_groups` and `state` hold those of both parts.

    Attributes:
        found_inf: A scalar on the weights' device. If it is 1.0, `step` changes nothing.
    """

    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True  # as of a fused AdamW

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: AdamW | None,
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Keep the parameters that each part updates.

        Args:
            matrices: Matrices, or those of a layer's experts [E, rows, columns]; whole or DTensors.
            others: Has the other parameters, if there are any; part of this optimizer from now on.
            lr: The learning rate of the matrices; comparable to AdamW's.
            weight_decay: The weight decay of the matrices.
        """
        hidden = {"params": list(matrices), "lr": lr, "weight_decay": weight_decay}
        further = others.param_groups if others else []
        super().__init__([hidden, *further], {})
        self._others = others

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a closure is not supported."""
        if closure is not None:
            raise ValueError(f"{type(self).__name__}.step takes no closure")
        hidden, *others = self.param_groups
        if self._others:
            self._others.state = self.state
            self._others.param_groups = others
            self._others.found_inf = self.found_inf  # type: ignore[attr-defined]
            self._others.step()
        matrices = [each for each in hidden["params"] if each.grad is not None]
        self._update(matrices, hidden["lr"], hidden["weight_decay"])

    def _update(self, matrices: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        """Update the matrices, which all have gradients."""
        raise NotImplementedError


def unless(bad: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """Return `new`, or `old` in a step that is left out; 0 times NaN would be NaN."""
    return new if bad is None else torch.where(bad.bool(), old, new)


class Muon(HiddenAndOthers):
    """Muon for hidden matrices, AdamW for other weights.

    Attributes:
        replicas: The processes that have the same gradients, and share the work.
        momentum: The share of the momentum before it that a step keeps.
    """

    replicas: DeviceMesh | None = None
    momentum = 0.95  # as published

    def _update(self, matrices: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        for alike in _alike(matrices):
            self._update_alike(alike, lr, weight_decay)

    def _update_alike(self, matrices: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        gradients = [(each, each.grad) for each in matrices if each.grad is not None]
        directions = torch.stack([_wide(self._direction(*each)) for each in gradients])
        scale = _RMS * math.sqrt(max(matrices[0].shape[-2:]))
        updates = self._orthogonalised(directions.flatten(0, -3)).view_as(directions)
        for matrix, update in zip(matrices, updates, strict=True):
            lying = update.mT if _stands(matrix) else update
            new = matrix * (1 - lr * weight_decay)
            new.add_(_laid_like(lying.to(matrix.dtype), matrix), alpha=-lr * scale)
            matrix.copy_(unless(self.found_inf, new, matrix))

    def _direction(self, matrix: nn.Parameter, gradient: Tensor) -> Tensor:
        """Update the momentum, and return Nesterov's direction as a whole matrix.

        It is rounded to bf16, except on a CPU: one without units for bf16 takes ten times as long.
        """
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        gradient = unless(self.found_inf, gradient, state["momentum"])  # which then stays as it is
        state["momentum"].lerp_(gradient, 1 - self.momentum)
        direction = gradient.lerp(state["momentum"], self.momentum)
        return whole(direction.float() if _is_used_on_cpu(direction) else direction.bfloat16())

    def _orthogonalised(self, directions: Tensor) -> Tensor:
        """Orthogonalise a share of the matrices, and get the others' from the other replicas."""
        number, replicas = len(directions), self.replicas
        if replicas is None or number < replicas.size():
            return orthogonalised(directions)
        share = -(-number // replicas.size())
        mine = directions[replicas.get_local_rank() * share :][:share]
        done = directions.new_zeros(share, *directions.shape[1:])
        if len(mine):
            done[: len(mine)] = orthogonalised(mine)
        every = directions.new_empty(replicas.size() * share, *directions.shape[1:])
        dist.all_gather_into_tensor(every, done, group=replicas.get_group())
        return every[:number]


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
    """Yield parameters in groups of one shape (or transposed) and limited size.

    The matrices of a layer's experts, which are one parameter, are never parted.
    """
    shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        *experts, rows, columns = parameter.shape
        shape = *experts, min(rows, columns), max(rows, columns)
        shapes.setdefault(shape, []).append(parameter)
    for shape, matrices in shapes.items():
        together = max(1, _TOGETHER // math.prod(shape))
        for start in range(0, len(matrices), together):
            yield matrices[start : start + together]


def _wide(matrix: Tensor) -> Tensor:
    return matrix.mT if _stands(matrix) else matrix


def _stands(matrix: Tensor) -> bool:
    """Return whether it has more rows than columns; of experts, each of them."""
    return matrix.shape[-2] > matrix.shape[-1]


def _is_used_on_cpu(tensor: Tensor) -> bool:
    """Return whether a CPU computes with it; offloaded weights lie on a CPU, too."""
    device = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device.type
    return device == "cpu"


def _laid_like(matrix: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's part of `matrix`, which is the same on all processes."""
    if not isinstance(parameter, DTensor):
        return matrix
    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(matrix, mesh, [Replicate()] * mesh.ndim, run_check=False)
    # Offloaded weights are on the CPU, not on the mesh's device.
    return everywhere.redistribute(placements=parameter.placements).to(parameter.device)


class AdamW8bit(HiddenAndOthers):
    """AdamW that keeps a hidden matrix's moments in 8 bits; the usual AdamW for other weights.

    Codes have the weight's shape; scales have a number for each block of a row. Both lie over
    processes as the weight does, so what a process has of a row must be whole blocks:
    `parallel/division.py` checks that.

    Attributes:
        betas: AdamW's, of the matrices.
        rule: Takes the steps in place of `update_in_8_bits`, as what `compiled_update` returns.
    """

    betas = 0.9, 0.999  # as of torch's AdamW
    rule: Callable[..., None] | None = None
    _tables: tuple[Tensor, Tensor] | None = None

    def _update(self, matrices: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        # As tensors: a compiled function is compiled anew for each other number.
        rate, decay = torch.tensor(lr), torch.tensor(lr * weight_decay)
        rule = self.rule or update_in_8_bits
        for matrix in matrices:
            state, gradient = self.state[matrix], cast("Tensor", matrix.grad)
            if not state:
                state.update(_moments_in_8_bits(matrix))
            self._tables = tables = self._tables or _tables(matrix.device)
            state["step"] += 1 if self.found_inf is None else 1 - self.found_inf
            for part in _parts([matrix, gradient, *(state[name] for name in _MOMENTS)]):
                rule(
                    *part,
                    tables=tables,
                    step=state["step"],
                    lr=rate,
                    decay=decay,
                    betas=self.betas,
                    bad=self.found_inf,
                )


_MOMENTS = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")


def _moments_in_8_bits(matrix: nn.Parameter) -> dict[str, Tensor]:
    """Return moments of zero: with a scale of zero, any code means zero."""
    state = {"step": torch.zeros((), device=matrix.device)}
    for name in _MOMENTS:
        state[name] = (
            _scales_like(matrix)
            if name.endswith("_scale")
            else torch.zeros_like(matrix, dtype=torch.uint8, requires_grad=False)
        )
    return state


def _scales_like(matrix: Tensor) -> Tensor:
    """Return a zero for each block of each row, divided over processes as `matrix` is."""
    block = moments_block(matrix.shape[-1])
    here = local(matrix)
    zeros = here.new_zeros(*here.shape[:-1], here.shape[-1] // block)
    if not isinstance(matrix, DTensor):
        return zeros
    like = torch.empty(*matrix.shape[:-1], matrix.shape[-1] // block, device="meta")
    scales = DTensor.from_local(
        zeros,
        matrix.device_mesh,
        matrix.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return scales.to(matrix.device)  # offloaded weights are on the CPU, not on the mesh's device


def _parts(tensors: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of a weight, its gradient, and `_MOMENTS`: as many blocks as `_AT_ONCE` allows.

    Each is [blocks, numbers of a block], or [blocks, 1] for scales.
    """
    block = moments_block(tensors[0].shape[-1])
    here = [local(each) for each in tensors]
    blocks = here[0].numel() // block
    if blocks == 0:  # this process has no row of it
        return
    views = [each.view(blocks, each.numel() // blocks) for each in here]
    together = max(1, _AT_ONCE // block)
    yield from zip(*(torch.split(each, together) for each in views), strict=True)


def update_in_8_bits(
    weight: Tensor,
    gradient: Tensor,
    first_codes: Tensor,
    first_scales: Tensor,
    second_codes: Tensor,
    second_scales: Tensor,
    *,
    tables: tuple[Tensor, Tensor],
    step: Tensor,
    lr: Tensor,
    decay: Tensor,
    betas: tuple[float, float],
    bad: Tensor | None,
) -> None:
    """Take AdamW's step in fp32, in place, and round the moments.

    A second moment that is not zero never becomes zero: the next step would divide by nothing.
    """
    signed, unsigned = tables
    first = (signed[first_codes.int()] * first_scales).lerp(gradient, 1 - betas[0])
    second = unsigned[second_codes.int()] * second_scales
    second = second.lerp(gradient.square(), 1 - betas[1])
    root = (second / (1 - betas[1] ** step)).sqrt() + _EPSILON
    new = weight * (1 - decay) - lr / (1 - betas[0] ** step) * first / root
    values = [new, *_encode(first, signed, 0), *_encode(second, unsigned, 1)]
    olds = weight, first_codes, first_scales, second_codes, second_scales
    for old, value in zip(olds, values, strict=True):
        old.copy_(unless(bad, value, old))


def compiled_update() -> Callable[..., None]:
    """Return `update_in_8_bits` as one kernel, for any number of blocks."""
    compiled: Callable[..., None] = torch.compile(update_in_8_bits, dynamic=True)
    return compiled


def _encode(numbers: Tensor, table: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Return the codes of the nearest entries of `table`, and each block's scale.

    Args:
        numbers: [blocks, numbers of a block].
        table: Its entries rise to 1.
        least: The lowest code to give.
    """
    scales = numbers.abs().amax(dim=1, keepdim=True)
    borders = (table[1:] + table[:-1]) / 2
    shares = numbers / scales.clamp(min=torch.finfo(torch.float32).tiny)
    codes = torch.bucketize(shares, borders, out_int32=True).clamp(min=least)
    return codes.to(torch.uint8), scales


def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 256 numbers of codes with a sign, and of those without, both in rising order."""
    signed, unsigned = (torch.tensor(dynamic_numbers(signed=each)) for each in (True, False))
    return signed.to(device), unsigned.to(device)


def dynamic_numbers(*, signed: bool) -> list[float]:
    """Return the paper's dynamic tree: a power of ten has twice the numbers of the one below.

    They lie in [-1, 1] with a sign, and in [0, 1] without.
    """
    numbers = [0.0, 1.0]
    for power in range(7):
        parts = 2 ** (power if signed else power + 1)
        middles = [
            (0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (power - 6) for part in range(parts)
        ]
        numbers += middles + ([-each for each in middles] if signed else [])
    return sorted(numbers)


def build_optimizer(model: Parallelized, train: Train, *, paged: bool = False) -> Optimizer:
    """Build AdamW, with its moments in 8 bits or paged or not, or Muon; only matrices have decay.

    Norm weights need not be small, so they do not decay. The optimizer's state covers what this
    process updates. It has the weights' precision; `adamw_8bit` rounds that of the blocks' matrices
    and, as bitsandbytes advises, not that of embeddings, whose gradients differ most.
    """
    trained = model.trained()
    optimizer: Optimizer
    if train.optimizer == "adamw":
        kind = partial(PagedAdamW, device=model.mesh.device) if paged else _FUSED
        optimizer = _adamw(trained, train, kind)
    else:
        optimizer = _with_hidden(trained, train, model.mesh)
    model.attach(optimizer)
    return optimizer


def _with_hidden(trained: dict[str, nn.Parameter], train: Train, mesh: Mesh) -> HiddenAndOthers:
    matrices = {n: each for n, each in trained.items() if "layers." in n and _is_matrix(n, each)}
    others = {name: each for name, each in trained.items() if name not in matrices}
    adamw = _adamw(others, train) if others else None
    hidden, rates = matrices.values(), {"lr": train.lr, "weight_decay": train.weight_decay}
    if train.optimizer == "muon":
        muon = Muon(hidden, adamw, **rates)
        muon.replicas = mesh.along("dp_replicate")
        muon.momentum = train.beta1
        return muon
    in_8_bits = AdamW8bit(hidden, adamw, **rates)
    in_8_bits.betas = train.beta1, train.beta2
    if train.fixed_compile:
        in_8_bits.rule = compiled_update()
    return in_8_bits


_FUSED = partial(AdamW, fused=True)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter has rows and columns; the biases of experts do not."""
    return parameter.ndim >= 2 and not name.endswith(".bias")


def _adamw(
    parameters: dict[str, nn.Parameter],
    train: Train,
    kind: Callable[..., AdamW] = _FUSED,
) -> AdamW:
    groups: dict[Any, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        # A fused kernel updates many tensors at once, but only tensors of the same mesh.
        key = _is_matrix(name, parameter), getattr(parameter, "device_mesh", None)
        groups.setdefault(key, []).append(parameter)
    decay = {True: train.weight_decay, False: 0.0}
    of_kinds = [
        {"params": group, "weight_decay": decay[is_matrix]}
        for (is_matrix, _), group in groups.items()
    ]
    return kind(of_kinds, lr=train.lr, betas=(train.beta1, train.beta2))
