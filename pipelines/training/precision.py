"""Sets the precision of matrix products; weights and moments stay in fp32.

It can also make the same step give the same bits, even on a GPU.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.models.weights import COMPUTE_DTYPES
from pipelines.planning.attention_rule import FLASH_CAPABILITY
from pipelines.recipe.training_section import Fp8Scaling, Precision, Train


def set_deterministic(wanted: bool) -> None:
    """Use only algorithms that give the same bits each time, if wanted; some are slower.

    On the CPU all do. An operation without such an algorithm raises RuntimeError.
    """
    if wanted:
        # cuBLAS requires this, and before the first matrix product on the GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.benchmark = False


# By what shares a scale: NVIDIA Ada, Hopper, and Blackwell.
_FP8_CAPABILITY: dict[Fp8Scaling, tuple[int, int]] = {
    "tensorwise": (8, 9),
    "rowwise": (9, 0),
    "mx": (10, 0),
}
_TF32_CAPABILITY = (8, 0)  # Ampere


def set_precision(train: Train, device: torch.device) -> None:
    """Make this process compute fp32 matrix products exactly, or as TF32.

    Raises:
        UserError: the device can't compute in this precision, or attend as `train` says.
    """
    precision = train.fixed_precision
    if train.attention == "varlen":
        _need(device, FLASH_CAPABILITY, "attention = varlen", "set flex or auto")
    if precision == "tf32":
        _need(device, _TF32_CAPABILITY, "precision = tf32", "set fp32 or bf16")
    if precision == "fp8":
        _need(device, _FP8_CAPABILITY["tensorwise"], "precision = fp8", "set bf16")
        scaling = train.fp8_scaling
        _need(device, _FP8_CAPABILITY[scaling], f"fp8_scaling = {scaling}", "set tensorwise")
    if device.type == "cpu":
        _let_onednn_multiply()
    else:  # not by a backend's own setting: torch.compile asks for this one, and refuses both
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def _let_onednn_multiply() -> None:
    """Give fp32 products to oneDNN, which takes half of MKL's time on AMD CPUs.

    PyTorch does so only where factors may be rounded to bf16. oneDNN rounds them on CPUs with AMX,
    but still computes in fp32 on other CPUs.
    """
    if not torch.cpu.get_capabilities().get("amx_tile", True):  # unknown on ARM: left alone
        torch.set_float32_matmul_precision("medium")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Run matrix products in half precision within the block, sums and the loss in fp32.

    The residual stream is in half precision, too, under every layout: `models.transformer`.
    `fully_shard` also gathers weights so, to halve the traffic.
    """
    dtype = COMPUTE_DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _need(device: torch.device, capability: tuple[int, int], value: str, instead: str) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= capability:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    major, minor = capability
    raise UserError(
        f"train.{value}: it needs an NVIDIA GPU of compute capability "
        f"{major}.{minor} or later, but this process has {name}; {instead}"
    )


class LossScale:
    """Scales the loss in fp16 as far as gradients allow (Micikevicius et al. 2018).

    A step whose gradient overflows anywhere is left out, and the scale is halved; after 2000 steps
    without overflow it doubles. `torch.amp.GradScaler` looks for overflow in a process's own
    gradients; here the whole model's gradient norm decides, so that all processes leave out the
    same steps. For other precisions the scale is 1 and never changes.
    """

    interval = 2000  # steps

    def __init__(self, precision: Precision, device: torch.device) -> None:
        """Begin with a scale of 2^16 for fp16."""
        self.scale: Tensor | float = 1.0
        if precision == "fp16":
            self.scale = torch.full((), 2.0**16, device=device)
        self._steps = torch.zeros((), dtype=torch.int32, device=device)  # since the scale changed

    def update(self, norm: Tensor) -> None:
        """Adapt the scale to the last step's gradient norm, without waiting for the device."""
        if not isinstance(self.scale, Tensor):
            return
        overflows = ~norm.isfinite()
        steps = torch.where(overflows, 0, self._steps + 1)
        grows = steps == self.interval
        self._steps = torch.where(grows, 0, steps)
        self.scale = torch.where(overflows, self.scale / 2, self.scale * (1 + grows.float()))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; this waits for the device."""
        return {"scale": float(self.scale), "steps": int(self._steps.item())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        if isinstance(self.scale, Tensor):
            self.scale.fill_(state_dict["scale"])
        self._steps.fill_(state_dict["steps"])
