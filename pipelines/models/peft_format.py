"""A recipe's adapters: new ones, or those of a folder in peft's format.

The folder holds `adapter_model.safetensors` and `adapter_config.json`. peft names layers as the
model's family does. Where a family keeps queries, keys and values in one matrix, their three As
are stacked on top of each other, and their Bs are blocks of one matrix that is zero elsewhere.

So it is for gate and up of a mixture's experts, whose weights are parameters of one module of
`transformers`. peft wraps the module once for each parameter. It stacks the experts' As on top of
each other, and their Bs side by side, rank by rank. In a mixture the layers beside the experts that
have the same names are named by their parameters, too: peft would take them for experts.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor

from pipelines.core.checked_json import parse_model
from pipelines.core.errors import UserError
from pipelines.core.storage import read_bytes, write_json
from pipelines.models.config import DecoderConfig
from pipelines.models.families import TOGETHER, find_family
from pipelines.models.family_weights import Shapes, Stored, stored_tensors
from pipelines.models.gather import Gather, of_all_stages
from pipelines.models.lora import (
    LoRALinear,
    Size,
    adapted_layers,
    add_adapters,
    chosen_sizes,
    init_adapters,
    linear_layers,
)
from pipelines.models.model_folder import read_object
from pipelines.models.safetensors_files import SafetensorsFiles
from pipelines.models.transformer import Transformer
from pipelines.models.weights import COMPUTE_DTYPES, Place, fill, writes
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.section import Count

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
T = TypeVar("T")
_A, _B = ".lora_a.weight", ".lora_b.weight"
_PLAIN = {"bias": "none", "use_dora": False, "modules_to_save": None, "lora_bias": False}


class _Sizes(BaseModel, strict=True):  # of peft's config
    r: Count
    lora_alpha: float
    rank_pattern: dict[str, Count] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_parameters: list[str] | None = None


class _Module(NamedTuple):
    """A module of the family, or a parameter of one, and the layers of `Transformer` in it.

    Attributes:
        name: As peft's targets and patterns name it.
        place: The module that peft wraps.
        layers: The layers' names.
        rows: Of each layer's B, the shape without its rank.
        stored: How peft's B holds those of the layers.
    """

    name: str
    place: str
    layers: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]
    stored: Stored

    @property
    def a(self) -> str:
        """peft's name for A."""
        return f"base_model.model.{self.place}.lora_A.weight"

    @property
    def b(self) -> str:
        """peft's name for B."""
        return f"base_model.model.{self.place}.lora_B.weight"


def save_adapter(model: Transformer | Sequence[Transformer], folder: Path) -> None:
    """Write a folder that `PeftModel.from_pretrained` loads; it names no base model.

    If the model is sharded or split into stages, all processes call this together, and rank 0
    writes.

    Args:
        model: The model or this process's stages of it.
        folder: Created if missing.
    """
    parts = [model] if isinstance(model, Transformer) else model
    config = parts[0].config
    layers = {name: layer for part in parts for name, layer in adapted_layers(part).items()}
    places: dict[str, Place] = {name + _A: layer.lora_a.weight for name, layer in layers.items()}
    places |= {name + _B: layer.lora_b.weight for name, layer in layers.items()}
    shapes = of_all_stages(parts, {name: tuple(each.shape) for name, each in places.items()})
    scales = of_all_stages(parts, {name: layer.scale for name, layer in layers.items()})
    gather = Gather(shapes, places)
    tensors: dict[str, Tensor] = {}
    sizes: dict[str, Size] = {}
    for module in _adapted(config, lambda each: not scales.keys().isdisjoint(each.layers)):
        adapted = [name for name in module.layers if name in scales]
        pairs = {name: (gather(name + _A, 0), gather(name + _B, 0)) for name in adapted}
        if writes():
            a, b = _joined(module, pairs, transposed=_is_transposed(config))
            tensors |= {module.a: a.flatten(0, -2), module.b: b}
            sizes[module.name] = Size(a.shape[-2], scales[adapted[0]])
    if not writes():
        return
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, _config(config, sizes))


def stored_sizes(folder: Path, config: DecoderConfig) -> dict[str, Size]:
    """Return the sizes of a folder's adapters by canonical layer name, without reading tensors.

    Raises:
        UserError: it is not a LoRA in peft's format, is of another model, or is not supported.
    """
    values, files, modules = _open(folder, config)
    alphas, ranks = values.get("alpha_pattern") or {}, values.get("rank_pattern") or {}
    sizes: dict[str, Size] = {}
    known: set[str] = set()
    for module in modules:
        rank = _by_pattern(ranks, module.name, values["r"])
        if files.places[module.a].shape[0] == rank * prod(module.rows[0][:-1]):
            alpha = _by_pattern(alphas, module.name, values["lora_alpha"])
            scale = alpha / (rank**0.5 if values.get("use_rslora") else rank)
            sizes |= dict.fromkeys(module.layers, Size(rank, scale))
            known |= {module.a, module.b}
    for name in files.places.keys() - known:
        raise UserError(f"{folder / WEIGHTS}: {name} is not a complete adapter for this model")
    return sizes


def load_adapter(model: Transformer, folder: Path) -> None:
    """Fill the adapters that `add_adapters` made with the sizes from `stored_sizes`.

    Only those of layers in this model, which may be a part of one, are read.

    Raises:
        UserError: as for `stored_sizes`, or a tensor's shape differs from the layer's.
    """
    _, files, modules = _open(folder, model.config)
    layers = adapted_layers(model)
    modules = [each for each in modules if not layers.keys().isdisjoint(each.layers)]
    tensors = dict(files.read(torch.device("cpu"), {n for m in modules for n in (m.a, m.b)}))
    for module in modules:
        parts = _split(module, tensors[module.b], model.config)
        for name, b in zip(module.layers, parts, strict=True):
            if name in layers:
                _fill(folder, name, layers[name], tensors[module.a], b)


def _fill(folder: Path, name: str, layer: LoRALinear, a: Tensor, b: Tensor) -> None:
    ours_a, ours_b = layer.lora_a.weight, layer.lora_b.weight
    a = a.reshape(*b.shape[:-2], -1, a.shape[-1])
    if (a.shape, b.shape) != (ours_a.shape, ours_b.shape):
        wanted = f"{tuple(ours_b.shape)} times {tuple(ours_a.shape)}"
        raise UserError(
            f"{folder / WEIGHTS}: the adapter of {name} is {tuple(b.shape)} times "
            f"{tuple(a.shape)}, but the layer's is {wanted}; it belongs to another model"
        )
    fill(ours_a, a)
    fill(ours_b, b)


def _joined(
    module: _Module, pairs: Mapping[str, tuple[Tensor, Tensor]], *, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Return a module's A and B from those of its layers, some of which may have none."""
    a = torch.cat([each.cpu() for each, _ in pairs.values()], dim=-2)
    parts, begun = [], 0
    for name, rows in zip(module.layers, module.rows, strict=True):
        part = torch.zeros(*rows, a.shape[-2])
        if name in pairs:
            b = pairs[name][1]
            part[..., begun : begun + b.shape[-1]] = b.cpu()
            begun += b.shape[-1]
        parts.append(part)
    b = parts[0] if module.stored.join is None else module.stored.join(parts)
    return a.contiguous(), (b.T if transposed else b).contiguous()


def _split(module: _Module, b: Tensor, config: DecoderConfig) -> Iterable[Tensor]:
    """Return the B of each of the module's layers, which all share its A."""
    if module.stored.split is None:
        return (b,)
    return module.stored.split(b.T if _is_transposed(config) else b)


def _is_transposed(config: DecoderConfig) -> bool:
    """Return whether the family stores weights as [in, out]; peft's A and B never are."""
    return config.family == "gpt2"


def _modules(config: DecoderConfig) -> Iterator[_Module]:
    """Yield every linear layer of the family's blocks; gate and up of experts before down."""
    with torch.device("meta"):
        linears = linear_layers(Transformer(config)).items()
    shapes = {f"{name}.weight": tuple[int, ...](each.weight.shape) for name, each in linears}
    plain: Shapes = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    experts: Shapes = {name: shape for name, shape in shapes.items() if len(shape) == 3}
    names = replace(find_family(config.family).names, fused=TOGETHER)
    for stored in (*stored_tensors(config, plain), *stored_tensors(config, experts, names)):
        layers = tuple(name.removesuffix(".weight") for name in stored.parameters)
        rows = tuple(shapes[each][:-1] for each in stored.parameters)
        place = stored.name.removesuffix(".weight")
        name = stored.name if config.experts and ".self_attn." not in place else place
        if layers[0] + ".weight" in experts:
            place, stored = place.rpartition(".")[0], _side_by_side(config, stored)
        yield _Module(name, place, layers, rows, stored)


def _side_by_side(config: DecoderConfig, stored: Stored) -> Stored:
    """Return the same, but of the experts' Bs: peft's is [out, rank, experts], as a matrix."""
    number = len(stored.parameters)
    # gpt-oss's outputs of gate and up take turns.
    apart, at = ((-1, number), 2) if config.family == "gpt_oss" else ((number, -1), 1)

    def split(b: Tensor) -> Sequence[Tensor]:
        b = b.view(len(b), -1, config.experts).permute(2, 0, 1)
        return b.reshape(config.experts, *apart, b.shape[-1]).unbind(at)

    def join(bs: Sequence[Tensor]) -> Tensor:
        return torch.stack(tuple(bs), at).flatten(1, 2).movedim(0, 2).flatten(1)

    return replace(stored, split=split, join=join)


def _adapted(config: DecoderConfig, has: Callable[[_Module], bool]) -> list[_Module]:
    """Return the modules that have an adapter; the last one in a place is the outermost there."""
    found = [each for each in _modules(config) if has(each)]
    places = [each.place for each in found]
    inner = (".base_layer" * (each in places[n:]) for n, each in enumerate(places, 1))
    return [m._replace(place=m.place + more) for m, more in zip(found, inner, strict=True)]


def _open(
    folder: Path, config: DecoderConfig
) -> tuple[dict[str, Any], SafetensorsFiles, list[_Module]]:
    """Return a folder's configuration and files, and the modules that may have adapters in it."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: no {name}; give an adapter in peft's format")
    values = read_object(folder / CONFIG)
    if values.get("peft_type") != "LORA":
        raise UserError(f"{folder / CONFIG}: peft_type = {values.get('peft_type')!r}; want 'LORA'")
    for key, wanted in _PLAIN.items():
        if values.get(key, wanted) != wanted:
            raise UserError(
                f"{folder / CONFIG}: {key} = {values[key]!r}; only {wanted!r} is supported"
            )
    parse_model(read_bytes(folder / CONFIG), _Sizes, folder / CONFIG)
    files = SafetensorsFiles([folder / WEIGHTS])
    targets = tuple(f".{each}" for each in values.get("target_parameters") or ())
    named = _adapted(config, lambda m: m.name == m.place or f".{m.name}".endswith(targets))
    return values, files, [m for m in named if files.places.keys() >= {m.a, m.b}]


def _config(config: DecoderConfig, sizes: Mapping[str, Size]) -> dict[str, Any]:
    """Return peft's config: the most common adapter size, and patterns for modules that differ."""
    modules = list(_modules(config))
    usual = Counter(sizes.values()).most_common(1)[0][0]
    others = {name: size for name, size in sizes.items() if size != usual}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": usual.rank,
        "lora_alpha": usual.alpha,
        "rank_pattern": {name: size.rank for name, size in others.items()},
        "alpha_pattern": {name: size.alpha for name, size in others.items()},
        "target_modules": _shortest([m.name for m in modules if m.name == m.place], sizes, 1),
        "target_parameters": _shortest([m.name for m in modules if m.name != m.place], sizes, 2),
        "fan_in_fan_out": _is_transposed(config),
        "lora_dropout": 0.0,
        "inference_mode": True,
        **_PLAIN,
    }


def _shortest(names: Sequence[str], sizes: Mapping[str, Size], least: int) -> list[str]:
    """Return the shortest endings, of some parts at least, that match the adapted names alone."""
    adapted = [name for name in names if name in sizes]
    for parts in range(least, 10):
        ends = {".".join(name.split(".")[-parts:]) for name in adapted}
        if sum(name.endswith(tuple(f".{end}" for end in ends)) for name in names) == len(adapted):
            return sorted(ends)
    return sorted(adapted)


def _by_pattern(patterns: Mapping[str, T], module: str, default: T) -> T:
    """Return the value of the first pattern that matches the end of the name, as peft does."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def adapt(model: Transformer, recipe: Recipe, whole: DecoderConfig | None = None) -> None:
    """Freeze a model and add the recipe's adapters, if any, in place; best on the meta device.

    Frozen parameters are stored in the type that they are computed in.

    Args:
        model: A decoder.
        recipe: `adapter` and the precision are used.
        whole: The shape of the decoder that the adapters are of, where `model` has fewer layers.

    Raises:
        UserError: a target is not a layer of the model, or `adapter.init_from` is of another one.
    """
    adapter = recipe.adapter
    if adapter.kind == "none":
        return
    if adapter.init_from is None:
        sizes = chosen_sizes(model, adapter)
    else:
        sizes = stored_sizes(Path(adapter.init_from), whole or model.config)
    dtype = COMPUTE_DTYPES.get(recipe.train.fixed_precision, torch.float32)
    add_adapters(model, sizes, adapter, dtype)


def fill_adapters(model: Transformer, recipe: Recipe) -> None:
    """Initialise the adapters, if any, from the seed or from the folder `adapter.init_from`."""
    if recipe.adapter.init_from is None:
        init_adapters(model, recipe.seed)
    else:
        load_adapter(model, Path(recipe.adapter.init_from))
