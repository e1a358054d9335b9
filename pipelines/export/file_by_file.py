"""Exports with other weights, written one file at a time, so that memory holds no whole model."""

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.core.errors import UserError
from pipelines.core.storage import write_json
from pipelines.export.source import check_whole, companion_files
from pipelines.models.model_folder import CONFIG, INDEX, read_object
from pipelines.models.served import OFFLINE, block_linears
from pipelines.run.progress import ProgressMeter

Tensors = Mapping[str, Tensor]
GROUPS = (32, 64, 128, 256)  # the numbers of weights that may share a scale in torchao's kernels
_BLOCK = 1 << 19  # weights rounded at a time; of 1 << 17 to 1 << 24 the fastest, on an AMD EPYC


def rewrite(
    source: Path,
    folder: Path,
    change: Callable[[str, Tensor], Tensors],
    config: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    meter: ProgressMeter | None = None,
) -> None:
    """Write a model's folder with other weights.

    Args:
        source: A registered folder.
        folder: An existing folder that receives the files.
        change: Returns what is written in place of a tensor, given its name and itself.
        config: What to add to `config.json`.
        metadata: What to add to each file of weights.
        meter: Told the bytes that are read, after each tensor.

    Raises:
        UserError: See `source.check_whole`.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    weights = check_whole(source)
    whole = sum(path.stat().st_size for path in weights)
    files: dict[str, str] = {}
    read = size = 0
    for path in weights:
        written: dict[str, Tensor] = {}
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                tensor = file.get_tensor(name)
                read += tensor.nbytes
                written |= change(name, tensor)
                if meter is not None:
                    meter.write(read / 1e6, whole / 1e6, "MB")
        save_file(written, folder / path.name, metadata={"format": "pt", **(metadata or {})})
        _sort_header(folder / path.name)
        files |= dict.fromkeys(written, path.name)
        size += sum(tensor.nbytes for tensor in written.values())
    for path in companion_files(source):
        shutil.copyfile(path, folder / path.name)
    write_json(folder / CONFIG, read_object(source / CONFIG) | dict(config))
    if (source / INDEX).is_file():
        index = read_object(source / INDEX)
        described = index.get("metadata", {}) | {"total_size": size}
        write_json(folder / INDEX, {"metadata": described, "weight_map": files})


def to_bfloat16(tensor: Tensor) -> Tensor:
    """Return a tensor in bfloat16, if it holds floating-point numbers."""
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def by_rows(encode: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor) -> tuple[Tensor, ...]:
    """Encode a matrix in blocks of rows, and join the blocks of each result along the rows.

    Rounding takes many steps. What they leave of a block stays in a core's cache; what they leave
    of a whole matrix takes new pages from the system at each step, and five times the time. So each
    core works on a block of its own.
    """
    rows = max(1, _BLOCK // weight.shape[1])
    blocks = [weight[first : first + rows] for first in range(0, len(weight), rows)]
    one_each = partial(torch.set_num_threads, 1)
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=one_each) as pool:
        parts = list(pool.map(encode, blocks))
        return tuple(pool.map(torch.cat, zip(*parts, strict=True)))


def linear_layers(source: Path) -> tuple[dict[str, nn.Linear], list[str]]:
    """Return the layers to quantise by their names, empty, and the names of other linear layers.

    Raises:
        UserError: transformers' model of this family has no linear layers, or experts beside them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, **OFFLINE))
    layers = dict(block_linears(model))
    if not layers:
        raise UserError(
            f"{source}: a {model.config.model_type} of transformers has no linear layers (it uses "
            "Conv1D), and nothing else is quantised; bf16 is the smallest form"
        )
    if any(parameter.ndim == 3 for parameter in model.parameters()):
        raise UserError(
            f"{source}: most weights of a {model.config.model_type} are its experts', which are no "
            "linear layers in transformers, and nothing else is quantised; bf16 is the smallest "
            "form"
        )
    every = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return layers, [name for name in every if name not in layers]


def check_group(group: int, layers: Mapping[str, nn.Linear]) -> None:
    """Check that this many weights of a row can share a scale in all layers.

    Raises:
        UserError: They can't.
    """
    if group not in GROUPS:
        raise UserError(f"--group-size {group}: it must be one of {', '.join(map(str, GROUPS))}")
    inputs = {name: layer.in_features for name, layer in layers.items()}
    for name, number in inputs.items():
        if number % group:
            fitting = [each for each in GROUPS if all(n % each == 0 for n in inputs.values())]
            hint = f"groups of {fitting[-1]} do" if fitting else "no group size does; use int8"
            raise UserError(
                f"groups of {group} weights don't divide the {number} inputs of {name}; {hint}"
            )


def is_weight_of(layers: Mapping[str, nn.Linear], name: str) -> bool:
    """Return whether a tensor is the matrix of one of the layers."""
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and layer in layers


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
