import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipelines.models.quantization import NF4Linear, dequantize, quantize
from tests.compiling import needs_a_linker


def error(weight: torch.Tensor, again: torch.Tensor) -> float:
    return (again.float() - weight.float()).abs().mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_error_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)).to(dtype) * 0.02
    ours = quantize(weight)
    codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(ours.codes, codes.view(-1))
    assert torch.equal(ours.scale_maxima, state.state2.absmax)
    assert torch.equal(ours.tree, state.state2.code)
    # Where a scale lies between two entries of the table, theirs may take either.
    assert (ours.scales != state.absmax).float().mean() < 0.002
    theirs = error(weight, dequantize_4bit(codes, state))
    assert error(weight, dequantize(ours, weight.shape, dtype)) == pytest.approx(theirs, rel=1e-4)


@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 9))
def test_any_shape_comes_back_within_half_a_step(rows: int, columns: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    nf4 = quantize(weight)
    blocks = -(-weight.numel() // 64)
    assert (len(nf4.codes), len(nf4.scales)) == (blocks * 32, blocks)
    again = dequantize(nf4, weight.shape, torch.float32)
    # The widest gap is 0.304 of the block's largest; scales are within 1% of the largest scale.
    assert (again - weight).abs().max() <= 0.17 * weight.abs().max()


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(128, 64)
    assert torch.equal(dequantize(quantize(zeros), zeros.shape, zeros.dtype), zeros)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_parts_decode_to_the_bits_of_the_whole(dim: int, part: int) -> None:
    # 576 blocks: the 256 that share a scale's scale end neither with a row nor with a part.
    layer = NF4Linear(nn.Linear(384, 96))
    codes, scales = (each.chunk(3, dim)[part] for each in (layer.codes, layer.scales))
    cut = layer.nf4._replace(codes=codes.contiguous(), scales=scales.contiguous())
    expected = layer.whole().chunk(3, dim)[part]
    first = part * (32 * 6 if dim == 0 else 2)
    assert torch.equal(dequantize(cut, expected.shape, torch.float32, (first, 6)), expected)


@pytest.fixture(params=["eager", pytest.param("compiled", marks=needs_a_linker)])
def layers(request: pytest.FixtureRequest) -> tuple[NF4Linear, nn.Module]:
    torch.manual_seed(1)
    layer = NF4Linear(nn.Linear(192, 128))
    if request.param == "eager":
        return layer, layer
    # The same choice of what to keep as the default's, without its code for the rest.
    return layer, torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")


def test_a_layer_computes_with_the_decoded_weight_and_keeps_the_codes_only(
    layers: tuple[NF4Linear, nn.Module],
) -> None:
    layer, called = layers
    x = torch.randn(5, 192, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        out = called(x)
    out.square().sum().backward()
    assert not [t for t in kept if t.is_floating_point() and t.numel() >= 192 * 128]

    theirs = x.detach().clone().requires_grad_()
    expected = nn.functional.linear(theirs, layer.whole(), layer.bias)
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(x.grad, theirs.grad)
    assert layer.codes.grad is None


@pytest.mark.parametrize("turned", [False, True])
def test_torch_takes_the_product_for_an_operator_of_its_own(turned: bool) -> None:
    layer = NF4Linear(nn.Linear(192, 64, bias=False))
    x = torch.randn(5, 64 if turned else 192, requires_grad=True)
    arguments = x, list(layer.nf4), [64, 192], [0, 3], False, turned
    torch.library.opcheck(torch.ops.penstock.nf4_product.default, arguments)


def test_autocast_chooses_the_type() -> None:
    layer = NF4Linear(nn.Linear(64, 64))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(2, 64))
    assert out.dtype == torch.bfloat16
    assert layer.whole().dtype == torch.float32


def test_a_layer_of_the_meta_device_is_filled_as_if_made_from_the_weight() -> None:
    linear = nn.Linear(80, 48, bias=False)
    with torch.device("meta"):
        layer = NF4Linear(nn.Linear(80, 48, bias=False))
    layer.to_empty(device="cpu")
    layer.fill(linear.weight)
    for name, tensor in NF4Linear(linear).state_dict().items():
        assert torch.equal(layer.state_dict()[name], tensor), name
