"""Weights in 4 bits in the format of the library compressed-tensors, which vLLM documents.

A weight is code * scale with codes from -8 to 7, and one scale for a group of weights of a row.
vLLM computes with kernels of its own for GPUs and for CPUs with AVX-512. transformers loads the
folder, too, if compressed-tensors is installed. Embeddings and head stay in bfloat16.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.export.tensor_by_tensor import (
    by_rows,
    check_group,
    is_weight_of,
    linear_layers,
    rewrite,
    to_bfloat16,
)
from pipelines.run.progress import ProgressMeter

_FORMAT = "pack-quantized"


def export_compressed(
    source: Path, folder: Path, group: int = 128, meter: ProgressMeter | None = None
) -> None:
    """Write a folder whose linear layers hold 4 bits per weight.

    Args:
        source: A registered folder.
        folder: An existing folder that receives the files.
        group: The number of weights of a row that share a scale; one of `GROUPS`.
        meter: Told the bytes that are read.

    Raises:
        UserError: See `source.check_whole`, `linear_layers` and `check_group`.
    """
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )

    layers, others = linear_layers(source)
    check_group(group, layers)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=group, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    how = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=others,
        format=_FORMAT,
        quantization_status="compressed",
    ).model_dump(mode="json", exclude_none=True)

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not is_weight_of(layers, name):
            return {name: to_bfloat16(tensor)}
        layer = name.removesuffix("weight")
        return {f"{layer}{key}": value for key, value in _packed(tensor, scheme).items()}

    rewrite(source, folder, change, {"dtype": "bfloat16", "quantization_config": how}, meter=meter)


def _packed(weight: Tensor, scheme: Any) -> dict[str, Tensor]:
    """Return what the library stores for a matrix [out, in]."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    library: Any = BaseCompressor.get_value_from_registry(_FORMAT)

    def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.float()
        groups = rows.view(len(rows), -1, scheme.weights.group_size)
        scale, _ = calculate_qparams(groups.amin(dim=-1), groups.amax(dim=-1), scheme.weights)
        state = {"weight": rows, "weight_scale": scale.to(torch.bfloat16)}
        packed = library.compress(state, scheme)
        return packed["weight_packed"], packed["weight_scale"]

    packed, scale = by_rows(encode, weight)
    return {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
