"""Exports with other weights, written a tensor at a time, so that memory holds no whole model."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from pipelines.core.errors import UserError
from pipelines.core.storage import write_json
from pipelines.export.source import check_whole, companion_files
from pipelines.models.model_folder import CONFIG, INDEX, read_object
from pipelines.models.safetensors_files import header_bytes, weight_bytes, write_one_by_one
from pipelines.models.served import OFFLINE, block_linears
from pipelines.run.progress import ProgressMeter

Tensors = Mapping[str, Tensor]
GROUPS = (32, 64, 128, 256)  # the numbers of weights that may share a scale in torchao's kernels
_PER_TENSOR = 4  # times as long as what a header says of a tensor is what it says of its parts
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
        UserError: See `source.check_whole` and `SafetensorsFiles`.
    """
    weights = check_whole(source)
    whole = weight_bytes(weights)
    files: dict[str, str] = {}
    read = size = 0

    def changed(path: Path) -> Iterator[tuple[str, Tensor]]:
        nonlocal read
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                tensor = file.get_tensor(name)
                read += tensor.nbytes
                yield from change(name, tensor).items()
                if meter is not None:
                    meter.write(read / 1e6, whole / 1e6, "MB")

    for path in weights:
        room = _PER_TENSOR * header_bytes(path)
        described = {"format": "pt", **(metadata or {})}
        written = write_one_by_one(folder / path.name, changed(path), described, room)
        files |= dict.fromkeys(written, path.name)
        size += sum(written.values())
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
    """Encode a matrix in blocks of rows; each result has the blocks' one below the other.

    Rounding takes many steps. What they leave of a block stays in a core's cache; what they leave
    of a whole matrix takes new pages from the system at each step, and five times the time. So each
    core works on a block of its own, and puts it where it belongs while it is in the cache.
    """
    rows = max(1, _BLOCK // weight.shape[1])
    like = encode(weight[:1])
    whole = tuple(part.new_empty((len(weight), *part.shape[1:])) for part in like)

    def place(first: int) -> None:
        block = slice(first, first + rows)
        for part, encoded in zip(whole, encode(weight[block]), strict=True):
            part[block] = encoded

    list(_pool(torch.get_num_threads()).map(place, range(0, len(weight), rows)))
    return whole


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1))


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
