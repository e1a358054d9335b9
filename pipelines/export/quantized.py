"""Weights in 8 or 4 bits and activations in bfloat16: torchao's tensors in transformers' format.

`AutoModelForCausalLM.from_pretrained` loads the folder if torchao is installed. The weights are in
safetensors, and `config.json` describes the quantisation. Embeddings and head stay in bfloat16.

int8 is symmetric, with one scale per row. int4 is asymmetric, with a scale and a zero per group of
weights of a row: weight = code * scale + zero, with codes from -8 to 7. torchao makes and uses its
`Int4Tensor` with kernels that exist for GPUs only (package mslk). This module makes the codes by
the same rule on any device, so a CPU can make, load and measure the model that a GPU will serve.
It makes the codes of int8 itself, too: they are torchao's to the bit, in a quarter of the time.
"""

import json
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pipelines.export.source import check_whole
from pipelines.export.tensor_by_tensor import (
    Tensors,
    by_rows,
    check_group,
    is_weight_of,
    linear_layers,
    rewrite,
    to_bfloat16,
)
from pipelines.models.safetensors_files import SafetensorsFiles
from pipelines.run.progress import ProgressMeter

if TYPE_CHECKING:
    from torchao.quantization import Int4Tensor, Int8Tensor

_LEVELS, _ZERO_CODE = 15, 8  # steps between 16 codes; the zero's code, counted from the lowest
_SMALLEST_SCALE = 1e-6
_HALF_RANGE = 127.5  # of the codes -128 to 127


def export_quantized(
    source: Path,
    folder: Path,
    bits: Literal[4, 8],
    group: int = 128,
    meter: ProgressMeter | None = None,
) -> None:
    """Write a folder whose linear layers hold 8 or 4 bits per weight.

    Args:
        source: A registered folder.
        folder: An existing folder that receives the files.
        bits: 8 or 4.
        group: With 4 bits, the number of weights that share a scale; one of `GROUPS`.
        meter: Told the bytes that are read.

    Raises:
        UserError: See `source.check_whole`, `linear_layers` and `check_group`.
    """
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from transformers import TorchAoConfig

    layers, _ = linear_layers(source)
    config = _torchao_config(layers, bits, group)

    def encoded(tensor: Tensor, rounds: bool) -> Tensor:
        tensor = to_bfloat16(tensor)
        if rounds:
            tensor = encode_int8(tensor) if bits == 8 else encode_int4(tensor, group)
        return tensor

    @cache  # most layers are alike, and a tensor without data takes torch a millisecond a step
    def shaped(shape: tuple[int, ...], dtype: torch.dtype, rounds: bool) -> Tensor:
        return encoded(torch.empty(shape, dtype=dtype, device="meta"), rounds)

    # transformers looks for what describes a tensor in whichever file it read last.
    places = SafetensorsFiles(check_whole(source)).places
    shapes = {
        name: shaped(place.shape, place.dtype, is_weight_of(layers, name))
        for name, place in places.items()
    }
    _, described = flatten_tensor_state_dict(shapes)

    def change(name: str, tensor: Tensor) -> Tensors:
        rounds = is_weight_of(layers, name)
        changed = encoded(tensor, rounds)
        return _parts(name, changed, described[name]) if rounds else {name: changed}

    how = {"dtype": "bfloat16", "quantization_config": TorchAoConfig(config).to_dict()}
    rewrite(source, folder, change, how, described, meter)


def _parts(name: str, tensor: Tensor, described: str) -> Tensors:
    """Return what a tensor of torchao consists of, as `flatten_tensor_state_dict` names it.

    That copies each part.
    """
    layer = name.removesuffix("weight")
    parts = json.loads(described)["_tensor_data_names"]
    return {f"{layer}_weight_{part}": getattr(tensor, part) for part in parts}


def encode_int4(weight: Tensor, group: int) -> "Int4Tensor":
    """Round a matrix [out, in] to 4 bits; each group of a row shares a scale and a zero.

    The smallest and largest weight of a group become the codes -8 and 7. Scale and zero are
    rounded to bfloat16, so each weight gets the nearest code.
    """
    from torchao.quantization import Int4Tensor

    qdata, scale, zero = by_rows(partial(_int4_rows, group=group), weight)
    return Int4Tensor(
        qdata=qdata,
        scale=scale.t().contiguous(),  # [in / group, out], as the kernels expect
        zero_point=zero.t().contiguous(),
        block_size=[1, group],
        shape=weight.shape,
    )


@torch.no_grad()  # in each thread
def _int4_rows(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return two codes a byte [out, in / 2], and scale and zero, both [out, in / group]."""
    groups = weight.float().view(len(weight), -1, group)
    # torch's aminmax takes six times as long as both of these.
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scale = ((high - low) / _LEVELS).clamp(min=_SMALLEST_SCALE).to(torch.bfloat16)
    zero = (low + _ZERO_CODE * scale.float()).to(torch.bfloat16)
    codes = (groups - zero.float()).div_(scale.float()).round_().clamp_(-_ZERO_CODE, 7)
    pairs = codes.to(torch.int8).flatten(1).view(torch.int16)  # the first code is in the low half
    packed = (pairs & 0xF) | ((pairs >> 4) & 0xF0)
    return packed.to(torch.int8), scale.squeeze(-1), zero.squeeze(-1)


def encode_int8(weight: Tensor) -> "Int8Tensor":
    """Round a matrix [out, in] to 8 bits; each row has a scale, which is computed in its type."""
    from torchao.quantization import Int8Tensor

    qdata, scale = by_rows(_int8_rows, weight)
    zero = torch.zeros_like(scale, dtype=torch.int8)
    return Int8Tensor(qdata, scale, [1, weight.shape[1]], weight.dtype, zero)


@torch.no_grad()  # in each thread
def _int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [out, in], and scales [out, 1] in fp32."""
    rows = weight.float()
    largest = torch.maximum(-rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True))
    smallest_scale = torch.finfo(torch.float32).eps
    scale = (largest.to(weight.dtype) / _HALF_RANGE).clamp(min=smallest_scale).float()
    return (rows * (1 / scale)).round_().clamp_(-128, 127).to(torch.int8), scale


def _torchao_config(layers: dict[str, nn.Linear], bits: Literal[4, 8], group: int) -> Any:
    """Return torchao's configuration, if it suits all layers."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    if bits == 8:
        return Int8WeightOnlyConfig(set_inductor_config=False)
    check_group(group, layers)
    return Int4WeightOnlyConfig(group_size=group, set_inductor_config=False)
