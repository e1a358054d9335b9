"""Weights in 8 or 4 bits and activations in bfloat16: torchao's tensors in transformers' format.

`AutoModelForCausalLM.from_pretrained` loads the folder if torchao is installed. The weights are in
safetensors, and `config.json` describes the quantisation. Embeddings and head stay in bfloat16.

int8 is symmetric, with one scale per row. int4 is asymmetric, with a scale and a zero per group of
weights of a row: weight = code * scale + zero, with codes from -8 to 7. torchao makes and uses its
`Int4Tensor` with kernels that exist for GPUs only (package mslk). This module makes the codes by
the same rule on any device, so a CPU can make, load and measure the model that a GPU will serve.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pipelines.core.errors import UserError
from pipelines.export.source import check_whole, companion_files
from pipelines.models.model_folder import CONFIG
from pipelines.models.served import PLAIN, block_linears

if TYPE_CHECKING:
    from torchao.quantization import Int4Tensor

GROUPS = (32, 64, 128, 256)  # the group sizes of torchao's int4 kernels
_LEVELS, _ZERO_CODE = 15, 8  # steps between 16 codes; the zero's code, counted from the lowest
_SMALLEST_SCALE = 1e-6


def export_quantized(source: Path, folder: Path, bits: Literal[4, 8], group: int = 128) -> None:
    """Write a folder whose linear layers hold 8 or 4 bits per weight.

    The whole model is in memory in bfloat16 meanwhile.

    Args:
        source: A registered folder.
        folder: An existing folder that receives the files.
        bits: 8 or 4.
        group: With 4 bits, the number of weights that share a scale; one of `GROUPS`.

    Raises:
        UserError: See `source.check_whole`; or the group does not divide some layer's inputs, or
            the family has no linear layers that torchao quantises.
    """
    from transformers import AutoModelForCausalLM, TorchAoConfig
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    weights = check_whole(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **PLAIN)
    layers = dict(block_linears(model))
    if not layers:
        raise UserError(
            f"{source}: a {model.config.model_type} of transformers has no linear layers (it uses "
            "Conv1D), and torchao quantises nothing else; bf16 is the smallest form"
        )
    config = _quantize(layers, bits, group)
    model.config.quantization_config = TorchAoConfig(config)
    model.hf_quantizer = TorchAoHfQuantizer(model.config.quantization_config)
    model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        _sort_header(path)
    written = {CONFIG, *(path.name for path in weights)}
    for path in companion_files(source):
        if path.name not in written:
            shutil.copyfile(path, folder / path.name)


def encode_int4(weight: Tensor, group: int) -> "Int4Tensor":
    """Round a matrix [out, in] to 4 bits; each group of a row shares a scale and a zero.

    The smallest and largest weight of a group become the codes -8 and 7. Scale and zero are
    rounded to bfloat16, so each weight gets the nearest code.
    """
    from torchao.quantization import Int4Tensor

    groups = weight.float().view(len(weight), -1, group)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / _LEVELS).clamp(min=_SMALLEST_SCALE).to(torch.bfloat16)
    zero = (low + _ZERO_CODE * scale.float()).to(torch.bfloat16)
    codes = ((groups - zero.float()) / scale.float()).round().clamp(-_ZERO_CODE, 7)
    codes = codes.to(torch.int8).flatten(1)
    return Int4Tensor(
        qdata=(codes[:, ::2] & 0xF) | (codes[:, 1::2] << 4),  # the first code is in the low half
        scale=scale.squeeze(-1).t().contiguous(),  # [in / group, out], as the kernels expect
        zero_point=zero.squeeze(-1).t().contiguous(),
        block_size=[1, group],
        shape=weight.shape,
    )


def _quantize(layers: dict[str, nn.Linear], bits: Literal[4, 8], group: int) -> Any:
    """Quantise the layers in place and return torchao's configuration."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    if bits == 8:
        config = Int8WeightOnlyConfig(set_inductor_config=False)
        for linear in layers.values():
            quantize_(linear, config)
        return config
    if group not in GROUPS:
        raise UserError(f"--group-size {group}: it must be one of {', '.join(map(str, GROUPS))}")
    for name, linear in layers.items():
        if linear.in_features % group:
            fitting = [each for each in GROUPS if _divides_all(each, layers)]
            hint = f"groups of {fitting[-1]} do" if fitting else "no group size does; use int8"
            raise UserError(
                f"groups of {group} weights don't divide the {linear.in_features} inputs of "
                f"{name}; {hint}"
            )
    for linear in layers.values():
        codes = encode_int4(linear.weight.detach(), group)
        linear.weight = nn.Parameter(codes, requires_grad=False)
    return Int4WeightOnlyConfig(group_size=group, set_inductor_config=False)


def _divides_all(group: int, layers: dict[str, nn.Linear]) -> bool:
    return all(linear.in_features % group == 0 for linear in layers.values())


def _sort_header(path: Path) -> None:
    """Sort a safetensors file's header, since safetensors writes metadata in random order."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        text = json.dumps(header, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        data = text.encode()
        if len(data) > length:
            raise ValueError(f"{path}: the header grew from {length} to {len(data)} bytes")
        file.seek(8)
        file.write(data.ljust(length))
