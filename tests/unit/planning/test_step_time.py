"""What is counted as computed again against what torch computes again."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import Layout
from pipelines.parallel.parallelize import checkpoint_activations
from pipelines.planning.hardware_table import named
from pipelines.planning.memory_training import Training
from pipelines.planning.step_time import FORWARD_SHARE, product_rate, step_time

SHAPE = DecoderConfig(
    layers=3, width=64, heads=4, kv_heads=4, hidden=192, vocab_size=256, context_length=32
)
TRAINING = Training(Layout(), "none", 2, 1, sequence=32)


def product_flops(mode: str) -> int:
    """Of the matrices' products in a forward and a backward pass, as torch dispatches them."""
    model = Transformer(SHAPE)
    model.init_weights(0)
    checkpoint_activations(model.layers.values(), mode)  # type: ignore[arg-type]
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros((2, 32), dtype=torch.int64)).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operator, count in counts.items() if "mm" in str(operator))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_products_are_those_that_torch_makes(mode: str) -> None:
    """A block that is computed again is so up to its last product; norms' weights count along."""
    hardware = named("a100-80")
    step = step_time(SHAPE, replace(TRAINING, activation_checkpoint=mode), hardware)
    rate = hardware.peak("fp32") * product_rate(hardware, "fp32")
    assert step.products * rate == pytest.approx(product_flops(mode), rel=5e-3)


def test_attention_is_computed_again_where_all_is() -> None:
    none, selective, full = (
        step_time(SHAPE, replace(TRAINING, activation_checkpoint=mode), named("h100"))
        for mode in ("none", "selective", "full")
    )
    assert none.attention == selective.attention
    assert full.attention == pytest.approx((1 + FORWARD_SHARE) * none.attention)
    assert none.traffic < selective.traffic < full.traffic


def test_tensor_parallel_processes_have_what_they_gather_whole() -> None:
    one, two, four = (
        step_time(SHAPE, replace(TRAINING, layout=Layout(tp=tp)), named("h100")).traffic
        for tp in (1, 2, 4)
    )
    assert one > two > one / 2
    assert two > four > two / 2
