"""oneDNN's products are torch's own to the rounding of sums."""

import pytest
import torch
from torch import nn

from pipelines.models import served
from pipelines.models.presets import preset
from pipelines.models.served import use_onednn
from pipelines.models.transformer import Transformer

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN"
)


@pytest.mark.parametrize("name", ["llama-100k", "gpt2-124m"])  # without biases, and with them
@torch.inference_mode()
def test_a_model_computes_the_same(name: str) -> None:
    config = preset("llama-100k").sized(257, 64) if name == "llama-100k" else small_gpt2()
    model = Transformer(config)
    model.init_weights(0)
    ids = torch.randint(0, 257, (3, 64), generator=torch.Generator().manual_seed(0))
    expected, expected_loss = model(ids), model(ids, targets_BS=ids)
    use_onednn(model)
    assert "forward" in vars(model.layers["0"].mlp.up_proj)
    torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(ids, targets_BS=ids), expected_loss)


def small_gpt2():
    from dataclasses import replace

    sizes = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 4, "hidden": 128}
    return replace(preset("gpt2-124m"), **sizes).sized(257, 64)


def half_linear(bits: int) -> nn.Linear:
    """A layer of the torchao folder formats, or of bfloat16."""
    layer = nn.Linear(128, 48, dtype=torch.bfloat16)
    if bits == 8:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
    return layer.requires_grad_(False)


@pytest.mark.parametrize("units", [True, False])
def test_half_precision_stays_as_it_is_where_the_cpu_has_units_for_it(
    units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "has_bfloat16_products", lambda: units)
    layer = half_linear(16)
    use_onednn(layer)
    assert ("forward" in vars(layer)) is not units


@pytest.mark.parametrize("bits", [16, 8])
@torch.inference_mode()
def test_half_precision_is_rounded_where_the_server_rounds(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no sum is rounded in fp32, in whatever order, every bit is the server's."""
    monkeypatch.setattr(served, "has_bfloat16_products", lambda: False)
    torch.manual_seed(0)
    layer = half_linear(bits)
    layer.bias.copy_(torch.randint(-64, 64, (48,)))
    if bits == 16:
        layer.weight.copy_(torch.randint(-127, 128, (48, 128)))
    x = torch.randint(-127, 128, (3, 40, 128)).to(torch.bfloat16)
    expected = layer(x)
    use_onednn(layer)
    assert torch.equal(layer(x), expected)
    # And for any input, to one rounding of the sum and one of each step behind it.
    x = torch.randn(3, 40, 128).to(torch.bfloat16)
    torch.testing.assert_close(layer(x), nn.Linear.forward(layer, x), rtol=2**-6, atol=2**-6)
