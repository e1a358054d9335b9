from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from pipelines.parallel.parallelize import checkpoint_activations, to_fp8
from pipelines.recipe.training_section import Fp8Scaling
from tests.compiling import needs_a_linker

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("scaling", "kinds"),
    [
        ("tensorwise", ("Float8Linear", "Float8Linear")),
        ("mx", ("MXLinear", "Linear")),  # 16 keys are not whole blocks of 32
    ],
)
def test_fp8_is_for_the_blocks_alone(scaling: Fp8Scaling, kinds: tuple[str, str]) -> None:
    shape = DecoderConfig(
        layers=1, width=32, heads=2, kv_heads=1, hidden=40, vocab_size=64, context_length=16
    )
    with torch.device("meta"):
        model = Transformer(shape)
        names = model.state_dict().keys()
        to_fp8(model, scaling, CPU)
    found = {name: type(each).__name__ for name, each in model.named_modules()}
    assert tuple(found[f"layers.0.self_attn.{name}_proj"] for name in "qk") == kinds
    assert found["layers.0.mlp.up_proj"] == "Linear"  # 40 is no multiple of 16
    assert found["lm_head"] == "Linear"
    assert model.state_dict().keys() == names
    assert model.lm_head.weight is model.embed_tokens.weight


def converted(layer: nn.Linear, scaling: Fp8Scaling) -> nn.Module:
    """A copy of the layer, in fp8."""
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": deepcopy(layer)})
    to_fp8(model, scaling, CPU)
    return model.layers["0"]


def test_a_row_of_large_numbers_costs_the_other_rows_no_digits_where_each_has_a_scale() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64) * torch.logspace(-6, 0, 32).unsqueeze(1)
    exact = nn.Linear(64, 64, bias=False)
    worst = {}
    for scaling in get_args(Fp8Scaling):
        off = (converted(exact, scaling)(x) - exact(x)).norm(dim=1) / exact(x).norm(dim=1)
        worst[scaling] = float(off.max().detach())
    assert worst["rowwise"] < 0.06
    assert worst["mx"] < 0.06
    assert worst["tensorwise"] > 0.5


def rounded(x: Tensor) -> Tensor:
    """Numbers as mxfp8 has them: 32 of a row share a power of two, so that none is cut off."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scales = 2.0 ** (blocks.abs().amax(-1, keepdim=True) / 448).log2().ceil()
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=needs_a_linker)])
def test_each_product_in_mxfp8_rounds_both_factors_along_what_it_sums(
    dtype: torch.dtype, is_compiled: bool
) -> None:
    torch.manual_seed(0)
    spread = torch.logspace(-3, 3, 64)
    layer = converted(nn.Linear(64, 96, dtype=dtype), "mx")
    x = (torch.randn(2, 32, 64) * spread).to(dtype).requires_grad_()
    run: Callable[[Tensor], Tensor] = torch.compile(layer, fullgraph=True) if is_compiled else layer
    y = run(x)
    given = torch.randn_like(y)
    y.backward(given)
    rows, outer = x.detach().flatten(0, 1), given.flatten(0, 1)
    weight = layer.weight.detach()
    torch.testing.assert_close(
        y.detach().flatten(0, 1), rounded(rows) @ rounded(weight).T + layer.bias
    )
    torch.testing.assert_close(
        x.grad.flatten(0, 1), rounded(outer) @ rounded(weight.T.contiguous()).T
    )
    by_columns = [rounded(each.T.contiguous()) for each in (outer, rows)]
    torch.testing.assert_close(layer.weight.grad, by_columns[0] @ by_columns[1].T)
    assert not torch.equal(y, nn.functional.linear(x, weight, layer.bias))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.count += function is torch.ops.aten.mm.default
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("selective", 0), ("full", 1)])
def test_products_in_mxfp8_are_kept(mode: Literal["none", "selective", "full"], again: int) -> None:
    block = nn.Sequential(converted(nn.Linear(64, 64), "mx"), nn.SiLU())
    checkpoint_activations([block], mode)
    with Products() as products:
        block(torch.randn(1, 32, 64, requires_grad=True)).sum().backward()
    assert products.count == 3 + again
