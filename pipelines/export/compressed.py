"""Weights in 4 bits as vLLM takes them: the format of the library compressed-tensors.

A weight is code * scale with codes from -8 to 7, and one scale for a group of weights of a row.
vLLM loads the folder with kernels of its own for GPUs and CPUs, and so does transformers, if
compressed-tensors is installed. Embeddings and head stay in bfloat16.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.core.errors import UserError
from pipelines.core.storage import write_json
from pipelines.export.source import check_whole, companion_files
from pipelines.models.model_folder import CONFIG, INDEX, read_object
from pipelines.models.served import OFFLINE, block_linears

_FORMAT = "pack-quantized"


def export_compressed(source: Path, folder: Path, group: int = 128) -> None:
    """Write a folder whose linear layers hold 4 bits per weight, one file at a time in memory.

    Args:
        source: A registered folder.
        folder: An existing folder that receives the files.
        group: The number of weights of a row that share a scale.

    Raises:
        UserError: See `source.check_whole`; or the group does not divide some layer's inputs, or
            the family has no linear layers.
    """
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )
    from safetensors.torch import load_file, save_file

    weights = check_whole(source)
    linears, others = _linear_layers(source)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=group, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    names: dict[str, str] = {}
    total = 0
    for path in weights:
        written: dict[str, Tensor] = {}
        for name, tensor in load_file(path).items():
            layer, _, kind = name.rpartition(".")
            if layer in linears and kind == "weight":
                _check_group(group, name, tensor)
                packed = _packed(tensor, scheme)
                written |= {f"{layer}.{key}": value for key, value in packed.items()}
            else:
                written[name] = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        save_file(written, folder / path.name, metadata={"format": "pt"})
        names |= dict.fromkeys(written, path.name)
        total += sum(tensor.nbytes for tensor in written.values())
    for path in companion_files(source):
        shutil.copyfile(path, folder / path.name)
    how = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=others,
        format=_FORMAT,
        quantization_status="compressed",
    ).model_dump(mode="json", exclude_none=True)
    config = read_object(source / CONFIG) | {"dtype": "bfloat16", "quantization_config": how}
    write_json(folder / CONFIG, config)
    if (source / INDEX).is_file():
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names})


def _linear_layers(source: Path) -> tuple[set[str], list[str]]:
    """Return the names of the layers whose weights are quantised, and of the other linear ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, **OFFLINE))
    linears = {name for name, _ in block_linears(model)}
    if not linears:
        raise UserError(
            f"{source}: a {model.config.model_type} of transformers has no linear layers (it uses "
            "Conv1D), and this format names no others; bf16 is the smallest form"
        )
    every = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return linears, [name for name in every if name not in linears]


def _check_group(group: int, name: str, weight: Tensor) -> None:
    inputs = weight.shape[1]
    if inputs % group:
        raise UserError(
            f"groups of {group} weights don't divide the {inputs} inputs of {name}; give another "
            "--group-size"
        )


def _packed(weight: Tensor, scheme: Any) -> dict[str, Tensor]:
    """Return what the library stores for a matrix [out, in]."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    low, high = weight.float().view(len(weight), -1, scheme.weights.group_size).aminmax(dim=-1)
    scale, _ = calculate_qparams(low, high, scheme.weights)
    state = {"weight": weight.float(), "weight_scale": scale.to(torch.bfloat16)}
    library: Any = BaseCompressor.get_value_from_registry(_FORMAT)
    packed: dict[str, Tensor] = library.compress(state, scheme)
    return packed
