"""Memory as papers and other projects publish it."""

import math
from dataclasses import replace

import pytest

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.presets import preset
from pipelines.parallel.layout import Layout
from pipelines.planning.hardware_table import named
from pipelines.planning.layout_rule import choose
from pipelines.planning.memory import Memory, estimate
from pipelines.planning.memory_state import kept_by_zero, state_of
from pipelines.planning.memory_training import Training
from pipelines.planning.serving_plan import served_weight_bytes
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.training_section import Adapter

GIB, GB = 2**30, 10**9
LLAMA_65B = DecoderConfig(
    layers=80,
    width=8192,
    heads=64,
    kv_heads=64,
    hidden=22_016,
    vocab_size=32_000,
    context_length=2048,
    tie_embeddings=False,
)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-175b", 174.6),  # Brown et al. 2020, table 2.1: 175.0
        ("llama3-8b", 8.03),  # Meta 2024
        ("llama3-70b", 70.6),
        ("llama2-7b", 6.74),  # Touvron et al. 2023
        ("mistral-7b", 7.24),  # Jiang et al. 2023
        ("gpt2-124m", 0.124),  # Radford et al. 2019
        ("gpt-neox-20b", 20.6),  # Black et al. 2022
        ("gpt-j-6b", 6.05),  # Wang and Komatsuzaki 2021
    ],
)
def test_parameters(name: str, billions: float) -> None:
    assert preset(name).parameters / 1e9 == pytest.approx(billions, rel=5e-3)


def test_the_weights_of_gpt_3_take_five_cards_of_80_gb() -> None:
    weights = served_weight_bytes(preset("gpt3-175b"), "bf16")
    assert weights / GIB == pytest.approx(326, abs=1)
    assert math.ceil(weights / named("h100").memory_bytes) == 5
    assert math.ceil(weights / (80 * GB)) == 5


@pytest.mark.parametrize(
    ("sharding", "gigabytes"),
    [("none", 120), ("optimizer", 31.4), ("gradients", 16.6), ("full", 1.9)],
)
def test_zero_s_table(sharding, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B, 64 ways; 2 + 2 + 12 bytes a weight."""
    kept = kept_by_zero(sharding, 64)
    a_weight = 2 * kept.weights + 2 * kept.gradients + 12 * kept.optimizer
    assert 7.5 * a_weight == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("sharding", "a_weight"),
    [("none", 16), ("optimizer", 8 + 8 / 64), ("gradients", 16 / 64), ("full", 16 / 64)],
)
def test_zero_as_it_is_done_here(sharding, a_weight: float) -> None:
    """16 bytes as well, but weights, gradients and moments all in fp32: 4 + 4 + 8.

    Stages 0 and 3 keep what the paper's do, stage 1 twice as much, as whole gradients are in fp32;
    stage 2 is FSDP2's, which divides weights too between steps.
    """
    shape = preset("llama2-7b")
    layout = Layout(dp_shard=1 if sharding == "none" else 64)
    training = Training(layout, sharding, micro_batch=1, micro_batches=1, sequence=2048)
    state = state_of(shape, training)
    kept = 4 / 64 * shape.parameters if training.is_fully_sharded else state.weights
    gradients = kept if training.is_fully_sharded else state.gradients
    assert (kept + gradients + state.optimizer) / shape.parameters == pytest.approx(a_weight)


@pytest.mark.parametrize("kind", ["none", "lora", "qlora"])
def test_llama_3_70b_is_not_trained_on_one_card_of_24_gb(kind: str) -> None:
    values = {
        "name": "t",
        "adapter": {"kind": kind, "rank": 8},
        "model": {"init_from": "models/llama3-70b"},
        "data": {"sequence_length": 512},
        "parallel": "auto",
        "train": {
            "micro_batch_size": "auto",
            "global_batch_size": 1,
            "precision": "bf16",
            "compile": False,
            "activation_checkpoint": "full",
        },
    }
    card = named("rtx4090").memory_bytes
    with pytest.raises(UserError, match=r"no layout of 1 processes fits 24 GiB a device"):
        choose(Recipe.model_validate(values), preset("llama3-70b"), 1, card)
    assert served_weight_bytes(preset("llama3-70b"), "int4") > card


def tuned(shape: DecoderConfig, kind: str, rank: int, samples: int, sequence: int) -> Memory:
    """One GPU, bf16, compiled, all of a block computed again."""
    training = Training(
        Layout(),
        "none",
        micro_batch=samples,
        micro_batches=1,
        sequence=sequence,
        precision="bf16",
        activation_checkpoint="full",
        adapter=Adapter.model_validate({"kind": kind, "rank": rank}),
        compiled=True,
    )
    return estimate(replace(shape, context_length=sequence), training)


def test_qlora_of_65b_fits_48_gb() -> None:
    """Dettmers et al. 2023, with a rank of 16; theirs of 64 needs their paged optimizer."""
    assert tuned(LLAMA_65B, "qlora", 16, 1, 512).total < 48 * GB < named("l40s").memory_bytes
    assert tuned(LLAMA_65B, "lora", 16, 1, 512).used > 2 * 48 * GB


@pytest.mark.parametrize(("kind", "gib"), [("qlora", 7.4), ("lora", 16.2)])
def test_8b_with_adapters_as_torchtune_measured_it(kind: str, gib: float) -> None:
    """Its README of September 2024: an RTX 4090, 2 samples of 2048 tokens, compiled."""
    memory = tuned(preset("llama3-8b"), kind, 8, 2, 2048)
    assert memory.used / GIB == pytest.approx(gib, rel=0.1)
    assert memory.total < named("rtx4090").memory_bytes
