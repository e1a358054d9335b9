"""How Hugging Face's files store each family's tensors: their names, fused or transposed.

Shape suffixes: N heads, H features of a head, X any.
"""

# ruff: noqa: N806 (names that end in their shape)

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipelines.models.config import DecoderConfig
from pipelines.models.families import TensorNames, find_family

_Split = Callable[[Tensor], Sequence[Tensor]]
_Join = Callable[[Sequence[Tensor]], Tensor]
Shapes = dict[str, tuple[int, ...]]

# Names of causal masks and rotary frequencies, which older files store beside the weights.
NO_WEIGHT = re.compile(r"(\.|^)(attn|attention)\.(bias|masked_bias)$|rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Stored:
    """One tensor of a file, and the parameters that it holds.

    Attributes:
        name: The tensor's name in the file.
        parameters: Their canonical names; several if the family fuses them.
        shape: The tensor's shape in the file.
        split: Maps the file's tensor to the parameters; None if it is one unchanged parameter.
        join: The inverse of `split`; None in the same case.
        expert: Whose tensor it is, if it is one expert's of a parameter that holds all of them.
    """

    name: str
    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    split: _Split | None = None
    join: _Join | None = None
    expert: int | None = None


def base_prefix(config: DecoderConfig) -> str:
    """Return the prefix of every tensor name but the head's."""
    return find_family(config.family).names.base + "."


def stored_tensors(
    config: DecoderConfig, shapes: Shapes, names: TensorNames | None = None
) -> Iterator[Stored]:
    """Yield the stored tensors that hold these parameters, in the parameters' order.

    Args:
        config: The config of the model.
        shapes: Shapes by canonical name, of a whole model or a part; tied parameters once.
        names: The names; by default the family's.
    """
    names = names or find_family(config.family).names
    for parameter, shape in shapes.items():
        module, _, kind = parameter.rpartition(".")
        layer, inside = _layer(module)
        if layer is not None and (fused := _fused_with(names, inside)) is not None:
            stored, parts = fused
            if inside == parts[0]:
                parameters = tuple(f"layers.{layer}.{each}.{kind}" for each in parts)
                name = f"{names.base}.{names.layers}.{layer}.{stored}.{kind}"
                yield _fused(config, names, name, parameters, [shapes[each] for each in parameters])
            continue
        if layer is None:
            outside = names.outside.get(module)
            name = module if outside is None else f"{names.base}.{outside}"
        else:
            stored = names.inside.get(inside, inside)
            if inside == "self_attn.q_b_proj" and config.q_lora_rank is None:
                stored = "self_attn.q_proj"
            if "{}" in stored and len(shape) == 2:  # of a dense layer among mixtures
                stored = inside
            name = f"{names.base}.{names.layers}.{layer}.{stored}"
        if "{}" in name:
            for number in range(shape[0]):
                stored = f"{name.format(number)}.{kind}"
                yield Stored(stored, (parameter,), shape[1:], expert=number)
            continue
        yield _plain(names, f"{name}.{kind}", parameter, shape)


def _layer(module: str) -> tuple[str | None, str]:
    """Return the number of a module's layer (None outside the layers) and its name there."""
    if not module.startswith("layers."):
        return None, module
    _, number, inside = module.split(".", 2)
    return number, inside


def _plain(names: TensorNames, name: str, parameter: str, shape: tuple[int, ...]) -> Stored:
    if len(shape) == 2 and name.removesuffix(".weight").endswith(names.transposed):
        return Stored(name, (parameter,), shape[::-1], lambda x: (x.T,), lambda xs: xs[0].T)
    return Stored(name, (parameter,), shape)


def _fused_with(names: TensorNames, inside: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the stored module that holds a module among others, and all that it holds."""
    return next((fused for fused in names.fused.items() if inside in fused[1]), None)


def _fused(
    config: DecoderConfig,
    names: TensorNames,
    name: str,
    parameters: tuple[str, ...],
    shapes: list[tuple[int, ...]],
) -> Stored:
    """Return one tensor with several parameters: one after the other, head by head or in turns."""
    if ".experts." in name:
        experts, outputs, *inputs = shapes[0]
        return Stored(
            name.removesuffix(".weight").replace(".bias", "_bias"),
            parameters,
            (experts, *inputs, outputs * len(shapes)),
            lambda x: x.reshape(*x.shape[:-1], -1, len(shapes)).movedim(-2, 1).unbind(-1),
            lambda xs: torch.stack(tuple(xs), -1).movedim(1, -2).flatten(-2),
        )
    rows = [shape[0] for shape in shapes]
    whole = (sum(rows), *shapes[0][1:])
    if names.by_head:
        split = partial(_split_heads, heads=config.heads)
        join = partial(_join_heads, heads=config.heads)
        return Stored(name, parameters, whole, split, join)
    if names.transposed:
        columns = partial(_split_columns, columns=rows)
        return Stored(name, parameters, whole[::-1], columns, _join_columns)
    return Stored(
        name, parameters, whole, lambda x: x.split_with_sizes(rows), lambda xs: torch.cat(tuple(xs))
    )


def _split_columns(stored: Tensor, columns: list[int]) -> Sequence[Tensor]:
    return [each.T if each.ndim == 2 else each for each in stored.split_with_sizes(columns, -1)]


def _join_columns(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.T if each.ndim == 2 else each for each in parameters], dim=-1)


def _split_heads(stored: Tensor, heads: int) -> Sequence[Tensor]:
    x_N3HX = stored.reshape(heads, 3, -1, *stored.shape[1:])
    return [each.flatten(0, 1) for each in x_N3HX.unbind(1)]


def _join_heads(parameters: Sequence[Tensor], heads: int) -> Tensor:
    return torch.stack(
        [each.reshape(heads, -1, *each.shape[1:]) for each in parameters], 1
    ).flatten(0, 2)
