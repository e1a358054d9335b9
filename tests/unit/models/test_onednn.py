"""oneDNN's products are torch's own to the rounding of sums."""

import pytest
import torch
from torch import nn

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


@torch.inference_mode()
def test_what_is_not_fp32_stays_as_it_is() -> None:
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    use_onednn(layer)
    assert "forward" not in vars(layer)
