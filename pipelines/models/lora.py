"""LoRA: the model is frozen, and thin matrices beside its linear layers are trained instead.

A layer W [out, in] becomes W + alpha / rank · B A, with A [rank, in] and B [out, rank] (Hu et al.
2021). Over a base in NF4 it is QLoRA (Dettmers et al. 2023). Of a mixture, each expert has an A and
a B of its own.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipelines.core.errors import UserError
from pipelines.models.experts import ExpertLinear
from pipelines.models.quantization import NF4Linear
from pipelines.models.transformer import Transformer
from pipelines.models.weights import Place, canonical_name, fill, named_generator, whole
from pipelines.recipe.training_section import Adapter

Linear = nn.Linear | ExpertLinear


class Size(NamedTuple):
    """The rank and the scale of an adapter."""

    rank: int
    scale: float  # alpha ÷ rank

    @property
    def alpha(self) -> float:
        """The alpha of peft's configuration."""
        return self.scale * self.rank


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter.

    Attributes:
        base: The frozen layer; one of experts reads with its inputs how many rows each of them has.
        lora_a: Maps in to rank.
        lora_b: Maps rank to out; zero at first, so that the adapter changes nothing.
        scale: The factor of their product.
    """

    def __init__(self, base: Linear | NF4Linear, size: Size, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base
        with next(base.parameters()).device:
            self.lora_a = _like(base, base.in_features, size.rank)
            self.lora_b = _like(base, size.rank, base.out_features)
        nn.init.zeros_(self.lora_b.weight)
        self.scale = size.scale
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *routes: Tensor) -> Tensor:
        """Map [..., in] to [..., out]; `routes` is what a layer of experts reads besides."""
        thin = self.lora_a(self.dropout(x), *routes) * self.scale
        return self.base(x, *routes) + self.lora_b(thin, *routes)  # type: ignore[no-any-return]

    @property
    def size(self) -> Size:
        """The adapter's rank and scale."""
        return Size(self.lora_a.out_features, self.scale)

    @property
    def frozen(self) -> Place:
        """The frozen weight; of a layer in NF4, the layer stands for it."""
        return self.base if isinstance(self.base, NF4Linear) else self.base.weight

    @property
    def shape(self) -> torch.Size:
        """The shape of the frozen weight."""
        return self.frozen.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of the frozen weight."""
        return self.frozen.dtype

    @property
    def device(self) -> torch.device:
        """The device that holds the layer."""
        return self.lora_a.weight.device

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Copy in the frozen weight, or only this process's part if it is sharded."""
        fill(self.frozen, weight)

    @torch.no_grad()
    def whole(self) -> Tensor:
        """Return W + alpha / rank · B A, summed in fp32, in the type of W.

        If the layer is sharded, all processes that share it must call this.
        """
        weight = whole(self.frozen)
        product = whole(self.lora_b.weight).float() @ whole(self.lora_a.weight).float()
        return (weight.float() + self.scale * product).to(weight.dtype)


def _like(layer: nn.Module, inputs: int, outputs: int) -> Linear:
    """Return a new layer without a bias; beside one of experts, for as many of them."""
    if isinstance(layer, ExpertLinear):
        return ExpertLinear(len(layer.weight), inputs, outputs, bias=False)
    return nn.Linear(inputs, outputs, bias=False)


def chosen_sizes(model: Transformer, adapter: Adapter) -> dict[str, Size]:
    """Return the adapter sizes that a recipe asks for, by layer name.

    Raises:
        UserError: a target is not a linear layer of this model.
    """
    linears = linear_layers(model)
    known = {_last(name) for name in linears}
    for target in adapter.targets:
        if target not in known:
            raise UserError(
                f"adapter.targets: no linear layer of this model is named {target!r}; "
                f"there are {', '.join(sorted(known))}"
            )
    targets = adapter.targets or known
    size = Size(adapter.rank, adapter.alpha / adapter.rank)
    return {name: size for name in linears if _last(name) in targets}


def add_adapters(
    model: Transformer,
    sizes: Mapping[str, Size],
    adapter: Adapter,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Freeze a model and add adapters to its linear layers in place, also on the meta device.

    `init_adapters` or `peft_format.load_adapter` must fill the adapters afterwards.

    Args:
        model: A model or a part of one.
        sizes: Adapter sizes by layer name; other layers get no adapter and are only frozen.
        adapter: `kind` and `dropout` are used; with `qlora`, layers with an adapter become NF4.
        dtype: The type of the parameters that stay plain and frozen.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    for name, linear in linear_layers(model).items():
        if (size := sizes.get(name)) is not None:
            base = _quantised(name, linear) if adapter.kind == "qlora" else linear
            model.set_submodule(name, LoRALinear(base, size, adapter.dropout))


def _quantised(name: str, layer: Linear) -> NF4Linear:
    if isinstance(layer, ExpertLinear):
        raise UserError(
            f"adapter.kind = qlora: not on {name}, as NF4 is for layers of one matrix and not of "
            "experts; set lora, or adapter.targets to layers of attention"
        )
    return NF4Linear(layer)


def init_adapters(model: nn.Module, seed: int) -> None:
    """Draw each A from `seed` and its name, uniformly as `nn.Linear` does, and set B to zero.

    The result is the same under every layout.
    """
    for name, layer in adapted_layers(model).items():
        key = f"{name}.lora_a"
        generator = named_generator(seed, key, layer.device)
        limit = 1 / math.sqrt(layer.base.in_features)
        numbers = torch.empty(layer.lora_a.weight.shape, device=generator.device)
        fill(layer.lora_a.weight, numbers.uniform_(-limit, limit, generator=generator))
        nn.init.zeros_(layer.lora_b.weight)


def adapted_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Return the layers with an adapter, by canonical name."""
    return {
        canonical_name(name): layer
        for name, layer in model.named_modules()
        if isinstance(layer, LoRALinear)
    }


def linear_layers(model: Transformer) -> dict[str, Linear]:
    """Return the linear layers of the transformer blocks, by name; a router is none."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith("layers.") and isinstance(module, (nn.Linear, ExpertLinear))
    }


def _last(name: str) -> str:
    return name.rpartition(".")[2]
