import pytest

from pipelines.models.presets import preset
from pipelines.parallel.layout import Layout
from pipelines.planning.memory_state import adapter_parameters
from pipelines.planning.memory_training import Training
from pipelines.planning.storage_needs import (
    LEAST_STALL,
    Storage,
    checkpoint_size,
    demands,
    stall_seconds,
)
from pipelines.recipe.training_section import Adapter

LLAMA = preset("llama3-8b")


def training(layout: Layout, **values) -> Training:
    usual = {"sharding": "full", "micro_batch": 2, "micro_batches": 1, "sequence": 8192}
    return Training(layout=layout, **usual | {"precision": "bf16"} | values)


def needs(layout: Layout, nodes: int, storage: Storage | None, **values):
    found = demands(
        LLAMA,
        training(layout, **values),
        nodes=nodes,
        step_seconds=2.0,
        checkpoint_seconds=1000.0,
        storage=storage,
    )
    return {each.name: each for each in found}


def test_a_rate_is_shared_by_the_nodes() -> None:
    assert Storage(100e9, 50e9).per_node(100) == Storage(1e9, 0.5e9)


def test_what_each_node_needs() -> None:
    """128 samples a step of ids in four bytes, an eighth of them to each of eight nodes."""
    loader = needs(Layout(dp_shard=64), 8, None)["loader"]
    assert loader.wanted == 64 * 2 * 8192 * 4 / 8 / 2.0
    assert loader.holds is None
    checkpoint = needs(Layout(dp_shard=64), 8, None)["checkpoint"]
    assert checkpoint.wanted == LLAMA.parameters * 12 / 8 / 1000


def test_processes_of_one_group_read_the_same_samples() -> None:
    alone = needs(Layout(dp_shard=64), 8, None)["loader"].wanted
    beside = needs(Layout(dp_shard=8, tp=8), 8, None)["loader"].wanted
    assert beside == alone


def test_enough_for_one_node_is_too_little_for_many() -> None:
    storage = Storage(100e9, 0.1e9)
    few = needs(Layout(dp_shard=8), 1, storage)["checkpoint"]
    assert few.holds
    assert few.seconds == pytest.approx(LLAMA.parameters * 12 / 0.1e9)
    many = needs(Layout(dp_shard=8), 1, Storage(100e9, 0.05e9))["checkpoint"]
    assert not many.holds


def test_a_checkpoint_is_weights_and_two_moments_in_fp32() -> None:
    size = checkpoint_size(LLAMA, training(Layout()))
    assert (size.weights, size.optimizer) == (LLAMA.parameters * 4, LLAMA.parameters * 8)
    adapter = Adapter(kind="qlora", rank=8)
    adapted = checkpoint_size(LLAMA, training(Layout(), adapter=adapter))
    assert adapted.total == adapter_parameters(LLAMA, adapter) * 12


def test_moments_in_8_bits_are_less_to_save() -> None:
    size = checkpoint_size(LLAMA, training(Layout(dp_shard=8), optimizer="adamw_8bit"))
    in_blocks = LLAMA.layers * LLAMA.layer_parameters
    rest = LLAMA.parameters - in_blocks
    assert size.optimizer == pytest.approx(in_blocks * 2 * (1 + 4 / 64) + rest * 8, rel=1e-3)


def test_training_waits_until_each_part_is_in_host_memory() -> None:
    sharded = training(Layout(dp_shard=8))
    size = checkpoint_size(LLAMA, sharded)
    assert stall_seconds(size, sharded, 1e9) == pytest.approx(LLAMA.parameters * 12 / 8 / 1e9)
    assert stall_seconds(size, sharded, None) == LEAST_STALL
