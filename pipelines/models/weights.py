"""Whole tensors into parameters that may be sharded, and weights drawn from a seed.

`torch.distributed.tensor` is imported only where a parameter is a DTensor.
"""

import hashlib
import math
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from pipelines.models.config import DecoderConfig

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def canonical_name(name: str) -> str:
    """A parameter's name without what compilation and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@torch.no_grad()
def fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter; into a DTensor, this process's shard of it."""
    if not _is_sharded(parameter):
        parameter.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole tensor: none needs to send it.
    shard = distribute_tensor(
        whole, parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    parameter.to_local().copy_(shard.to_local())


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter; a DTensor is gathered, so all processes that share it must call this."""
    return (parameter.full_tensor() if _is_sharded(parameter) else parameter).detach()


def _is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    return hasattr(tensor, "placements")


def draw(module: nn.Module, config: DecoderConfig, seed: int) -> None:
    """Fill every parameter from `seed` and its name, and so alike under every layout.

    Matrices are normal with standard deviation 0.7 / sqrt(width), which is GPT-2's 0.02 at its
    width and does not leave narrow models too near zero; those that write to the residual stream
    are smaller by sqrt(2 x layers), so that its variance does not grow with depth. Norms are 1,
    biases 0.
    """
    normal = 0.7 / math.sqrt(config.width)
    into_residual = normal / math.sqrt(2 * config.layers)
    for wrapped, parameter in module.named_parameters():
        name = canonical_name(wrapped)
        if config.tie_embeddings and name == "lm_head.weight":
            name = "embed_tokens.weight"  # a pipeline's last stage holds a copy
        if parameter.ndim == 1:
            with torch.no_grad():
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        std = into_residual if name.endswith(_INTO_RESIDUAL) else normal
        # A GPU draws billions of numbers in a second; not every other device draws at all.
        device = parameter.device if parameter.device.type == "cuda" else torch.device("cpu")
        generator = torch.Generator(device).manual_seed(_seed(seed, name))
        numbers = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        fill(parameter, numbers.normal_(0.0, std, generator=generator))


def _seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
