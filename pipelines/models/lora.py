"""LoRA: a frozen model, and thin matrices beside its linear layers that are trained instead.

A layer W [out, in] becomes W + alpha / rank · B A, with A [rank, in] and B [out, rank] (Hu et al.
2021). Over a base in NF4 it is QLoRA (Dettmers et al. 2023).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipelines.core.errors import UserError
from pipelines.models.quantization import NF4Linear
from pipelines.models.transformer import Transformer
from pipelines.models.weights import canonical_name, fill, named_generator, whole
from pipelines.recipe.training_section import Adapter


class Size(NamedTuple):
    """The rank and the scale of an adapter."""

    rank: int
    scale: float  # alpha ÷ rank

    @property
    def alpha(self) -> float:
        """As peft has it."""
        return self.scale * self.rank


class LoRALinear(nn.Module):
    """A linear layer, frozen, with an adapter.

    Attributes:
        base: The layer.
        lora_a: in to rank.
        lora_b: rank to out; zero at first, so that the layer begins as it was.
        scale: Of their product.
    """

    def __init__(self, base: nn.Linear | NF4Linear, size: Size, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base
        device = next(base.parameters()).device
        self.lora_a = nn.Linear(base.in_features, size.rank, bias=False, device=device)
        self.lora_b = nn.Linear(size.rank, base.out_features, bias=False, device=device)
        nn.init.zeros_(self.lora_b.weight)
        self.scale = size.scale
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        thin = self.lora_a(self.dropout(x)) * self.scale
        return self.base(x) + self.lora_b(thin)  # type: ignore[no-any-return]

    @property
    def size(self) -> Size:
        """The adapter's rank and scale."""
        return Size(self.lora_a.out_features, self.scale)

    @property
    def shape(self) -> torch.Size:
        """The weight's shape."""
        return torch.Size((self.base.out_features, self.base.in_features))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the frozen weight."""
        base = self.base
        return base.dtype if isinstance(base, NF4Linear) else base.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.lora_a.weight.device

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Take over the frozen weight [out, in]; where it is sharded, this process's part."""
        fill(self.base if isinstance(self.base, NF4Linear) else self.base.weight, weight)

    @torch.no_grad()
    def whole(self) -> Tensor:
        """W + alpha / rank · B A [out, in], summed in fp32, in the type of W.

        Where it is sharded, all processes that share it must call this.
        """
        weight = whole(self.base if isinstance(self.base, NF4Linear) else self.base.weight)
        product = whole(self.lora_b.weight).float() @ whole(self.lora_a.weight).float()
        return (weight.float() + self.scale * product).to(weight.dtype)


def chosen_sizes(model: Transformer, adapter: Adapter) -> dict[str, Size]:
    """What a recipe asks for: the sizes of adapters by the names of the layers that get them.

    Raises:
        UserError: a target is no linear layer of this model.
    """
    linears = _linears(model)
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
    """Freeze a model and give its linear layers adapters, in place; on the meta device, too.

    The adapters are to be filled by `init_adapters` or `peft_format.load_adapter`.

    Args:
        model: Or a part of one.
        sizes: By the names of the layers that get one; others stay frozen as they are.
        adapter: `kind` and `dropout` are used; with `qlora`, layers that get one become NF4.
        dtype: Of what stays a plain frozen parameter.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    for name, linear in _linears(model).items():
        if (size := sizes.get(name)) is not None:
            base = NF4Linear(linear) if adapter.kind == "qlora" else linear
            _replace(model, name, LoRALinear(base, size, adapter.dropout))


def init_adapters(model: nn.Module, seed: int) -> None:
    """A from `seed` and its name, uniform as `nn.Linear`'s weights are; B zero.

    The same under every layout.
    """
    for name, layer in adapted_layers(model).items():
        key = f"{name}.lora_a"
        generator = named_generator(seed, key, layer.device)
        limit = 1 / math.sqrt(layer.base.in_features)
        numbers = torch.empty(layer.lora_a.weight.shape, device=generator.device)
        fill(layer.lora_a.weight, numbers.uniform_(-limit, limit, generator=generator))
        nn.init.zeros_(layer.lora_b.weight)


def adapted_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers that have an adapter, by canonical name."""
    return {
        canonical_name(name): layer
        for name, layer in model.named_modules()
        if isinstance(layer, LoRALinear)
    }


def merge(model: nn.Module) -> None:
    """Put plain linear layers in the place of adapted ones, in place; as exact as their type."""
    for name, layer in adapted_layers(model).items():
        with torch.device("meta"):
            linear = nn.Linear(layer.base.in_features, layer.base.out_features, bias=False)
        linear.weight = nn.Parameter(layer.whole())
        linear.bias = layer.base.bias
        _replace(model, name, linear)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Those of the blocks."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith("layers.") and isinstance(module, nn.Linear)
    }


def _last(name: str) -> str:
    return name.rpartition(".")[2]
