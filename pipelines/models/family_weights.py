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

from pipelines.models.config import DecoderConfig, Family

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
    """

    name: str
    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    split: _Split | None = None
    join: _Join | None = None


@dataclass(frozen=True)
class _Names:
    """The names that a family gives its modules.

    Attributes:
        base: The prefix of every name but the head's; files of a model without a head lack it.
        outside: Maps canonical names to the family's, for modules outside the layers.
        layers: The family's name for the list of layers.
        inside: The same map for modules in a layer; None means that the canonical names are used.
        fused: The module that holds queries, keys and values; empty if each has its own.
        transposed: Modules whose weights are stored [in, out].
    """

    base: str
    outside: dict[str, str]
    layers: str = "layers"
    inside: dict[str, str] | None = None
    fused: str = ""
    transposed: tuple[str, ...] = ()


_LLAMA = _Names("model", {"embed_tokens": "embed_tokens", "norm": "norm"})
_NAMES: dict[Family, _Names] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gpt2": _Names(
        "transformer",
        {"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"},
        layers="h",
        inside={
            "input_layernorm": "ln_1",
            "self_attn.o_proj": "attn.c_proj",
            "post_attention_layernorm": "ln_2",
            "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
        },
        fused="attn.c_attn",
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ),
    "gpt_neox": _Names(
        "gpt_neox",
        {"embed_tokens": "embed_in", "norm": "final_layer_norm"},
        inside={
            "input_layernorm": "input_layernorm",
            "self_attn.o_proj": "attention.dense",
            "post_attention_layernorm": "post_attention_layernorm",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        fused="attention.query_key_value",
    ),
    "gptj": _Names(
        "transformer",
        {"embed_tokens": "wte", "norm": "ln_f"},
        layers="h",
        inside={
            "input_layernorm": "ln_1",
            "self_attn.q_proj": "attn.q_proj",
            "self_attn.k_proj": "attn.k_proj",
            "self_attn.v_proj": "attn.v_proj",
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "mlp.fc_in",
            "mlp.down_proj": "mlp.fc_out",
        },
    ),
}
_QKV = tuple(f"self_attn.{each}_proj" for each in "qkv")


def base_prefix(config: DecoderConfig) -> str:
    """Return the prefix of every tensor name but the head's."""
    return _NAMES[config.family].base + "."


def stored_tensors(config: DecoderConfig, shapes: Shapes) -> Iterator[Stored]:
    """Yield the stored tensors that hold these parameters, in the parameters' order.

    Args:
        config: The config of the model.
        shapes: Shapes by canonical name, of a whole model or a part; tied parameters once.
    """
    names = _NAMES[config.family]
    for parameter, shape in shapes.items():
        module, _, kind = parameter.rpartition(".")
        layer, inside = _layer(module)
        if names.fused and inside in _QKV:
            if inside == _QKV[0]:
                yield _fused(config, names, f"{names.base}.{names.layers}.{layer}.", kind, shape)
            continue
        if layer is None:
            outside = names.outside.get(module)
            name = module if outside is None else f"{names.base}.{outside}"
        else:
            stored = inside if names.inside is None else names.inside[inside]
            name = f"{names.base}.{names.layers}.{layer}.{stored}"
        yield _plain(config, names, f"{name}.{kind}", parameter, shape)


def _layer(module: str) -> tuple[str | None, str]:
    """Return the number of a module's layer (None outside the layers) and its name there."""
    if not module.startswith("layers."):
        return None, module
    _, number, inside = module.split(".", 2)
    return number, inside


def _plain(
    config: DecoderConfig, names: _Names, name: str, parameter: str, shape: tuple[int, ...]
) -> Stored:
    if len(shape) == 2 and name.removesuffix(".weight").endswith(names.transposed):
        return Stored(name, (parameter,), shape[::-1], lambda x: (x.T,), lambda xs: xs[0].T)
    if config.family == "gptj" and parameter.endswith(("q_proj.weight", "k_proj.weight")):
        # GPT-J rotates neighbouring features; `rotate` pairs features half the rotary width apart.
        apart = torch.arange(config.rotary_width).view(-1, 2).T.reshape(-1)
        return Stored(
            name,
            (parameter,),
            shape,
            lambda x: (_reorder(x, apart, config.heads),),
            lambda xs: _reorder(xs[0], apart.argsort(), config.heads),
        )
    return Stored(name, (parameter,), shape)


def _fused(
    config: DecoderConfig, names: _Names, layer: str, kind: str, shape: tuple[int, ...]
) -> Stored:
    """Return one tensor with queries, keys and values, one after the other or head by head."""
    number = layer.split(".")[-2]
    parameters = tuple(f"layers.{number}.{module}.{kind}" for module in _QKV)
    fused = (3 * shape[0], *shape[1:])
    if names.transposed:
        return Stored(
            f"{layer}{names.fused}.{kind}", parameters, fused[::-1], _split_columns, _join_columns
        )
    split = partial(_split_heads, heads=config.heads)
    join = partial(_join_heads, heads=config.heads)
    return Stored(f"{layer}{names.fused}.{kind}", parameters, fused, split, join)


def _split_columns(stored: Tensor) -> Sequence[Tensor]:
    return [each.T if each.ndim == 2 else each for each in stored.chunk(3, dim=-1)]


def _join_columns(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.T if each.ndim == 2 else each for each in parameters], dim=-1)


def _split_heads(stored: Tensor, heads: int) -> Sequence[Tensor]:
    x_N3HX = stored.reshape(heads, 3, -1, *stored.shape[1:])
    return [each.flatten(0, 1) for each in x_N3HX.unbind(1)]


def _join_heads(parameters: Sequence[Tensor], heads: int) -> Tensor:
    return torch.stack(
        [each.reshape(heads, -1, *each.shape[1:]) for each in parameters], 1
    ).flatten(0, 2)


def _reorder(x: Tensor, order: Tensor, heads: int) -> Tensor:
    """Reorder the first features of each head of [N x H, X]."""
    x_NHX = x.reshape(heads, -1, *x.shape[1:])
    turned, rest = x_NHX[:, order], x_NHX[:, len(order) :]
    return torch.cat((turned, rest), dim=1).flatten(0, 1)
