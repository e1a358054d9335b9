"""Copying whole tensors to and from parameters that may be sharded; drawing weights by seed.

`torch.distributed.tensor` is imported only where a parameter is a DTensor.
"""

import hashlib
import math
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.safetensors_files import Rows

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# The type of matrix products; around those in fp8, the other operations are in bf16.
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "base.")  # "base.": an adapter's
_INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def canonical_name(name: str) -> str:
    """Return a parameter's name without the prefixes of compilation, checkpointing and adapters."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def writes() -> bool:
    """Return whether this process writes files for its job: rank 0, or a process that is alone."""
    return not dist.is_initialized() or dist.get_rank() == 0


class Substitute(Protocol):
    """An object that stands for a parameter but is no tensor, such as an adapted layer."""

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's type."""

    @property
    def device(self) -> torch.device:
        """The device that holds the parameter."""

    def fill(self, whole: Tensor) -> None:
        """Copy in a whole parameter."""

    def whole(self) -> Tensor:
        """Return the parameter; all processes that share it must call this."""


Place = Tensor | Substitute


@torch.no_grad()
def fill(parameter: Place, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter; a DTensor takes only this process's shard."""
    if not isinstance(parameter, Tensor):
        parameter.fill(whole)
        return
    if not is_sharded(parameter):
        parameter.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole tensor, so none needs to send it.
    shard = distribute_tensor(
        whole, parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    parameter.to_local().copy_(shard.to_local())


def whole(parameter: Place) -> Tensor:
    """Return the whole parameter; all processes that share a DTensor must call this together."""
    if not isinstance(parameter, Tensor):
        return parameter.whole()
    if not is_sharded(parameter):
        return parameter.detach()
    # Offloaded weights lie on the CPU, but GPU processes exchange data between GPUs.
    there: DTensor = parameter.detach().to(parameter.device_mesh.device_type)  # type: ignore[assignment]
    return there.full_tensor()


def is_sharded(tensor: Place) -> "TypeGuard[DTensor]":
    """Return whether a parameter is a DTensor, of which this process holds only a part."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor: its shard of a DTensor, or all of it."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def host_like(tensor: Tensor, *, pinned: bool) -> Tensor:
    """Return memory of the host for what this process holds of a tensor, placed as that is."""
    here = local(tensor)
    memory = torch.empty(here.shape, dtype=here.dtype, pin_memory=pinned)
    if not is_sharded(tensor):
        return memory
    from torch.distributed.tensor import DTensor

    # `from_local` would move it to the mesh's device.
    return DTensor(memory, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def part_here(parameter: "DTensor") -> tuple[Rows, tuple[slice, ...]] | None:
    """Return which rows of a sharded parameter this process holds, and which part of each row.

    None if it holds no block of consecutive rows. A process without a row has those from 0 to 0.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if tuple(shape) != tuple(parameter.to_local().shape):
        return None
    rows = Rows(offset[0], offset[0] + shape[0]) if shape[0] else Rows(0, 0)
    ends = zip(offset[1:], shape[1:], strict=True)
    return rows, tuple(slice(first, first + length) for first, length in ends)


def draw(module: nn.Module, config: DecoderConfig, seed: int) -> None:
    """Fill every parameter from `seed` and its name, so that all layouts get the same weights.

    Matrices are normal with standard deviation 0.7 / sqrt(width), which is GPT-2's 0.02 at its
    width and not too near zero in narrow models. For matrices that write to the residual stream it
    is divided by sqrt(2 x layers), so that the stream's variance does not grow with depth. Norms
    multiply by 1, biases and sinks are 0.

    Raises:
        UserError: a parameter is quantised, as QLoRA's frozen weights are.
    """
    normal = 0.7 / math.sqrt(config.width)
    into_residual = normal / math.sqrt(2 * config.layers)
    for wrapped, parameter in module.named_parameters():
        name = canonical_name(wrapped)
        if config.tie_embeddings and name == "lm_head.weight":
            name = "embed_tokens.weight"  # the last stage of a pipeline holds a copy
        if not parameter.is_floating_point():
            raise UserError(
                f"{name} is quantised, but QLoRA can't adapt random weights; "
                "set model.init_from to a Hugging Face folder"
            )
        if parameter.ndim == 1 or name.endswith(".bias"):
            with torch.no_grad():
                is_zero = name.endswith((".bias", ".sinks")) or config.zero_centred_norms
                parameter.fill_(0.0 if is_zero else 1.0)
            continue
        std = into_residual if name.endswith(_INTO_RESIDUAL) else normal
        generator = named_generator(seed, name, parameter.device)
        numbers = torch.empty(parameter.shape, dtype=torch.float32, device=generator.device)
        fill(parameter, numbers.normal_(0.0, std, generator=generator))


def named_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Return a random generator that depends only on a seed and a name, such as a parameter's."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    # A GPU draws billions of numbers per second; some other devices have no generator.
    generator = torch.Generator(device if device.type == "cuda" else torch.device("cpu"))
    return generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
