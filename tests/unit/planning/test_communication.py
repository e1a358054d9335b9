from dataclasses import replace

import pytest

from pipelines.models.presets import preset
from pipelines.parallel.layout import Layout
from pipelines.planning.communication import REACHED, Group, communication
from pipelines.planning.hardware_table import named
from pipelines.planning.memory_training import Training
from pipelines.recipe.training_section import Adapter

H100 = named("h100")
LLAMA = preset("llama3-8b")


def training(layout: Layout, **values) -> Training:
    usual = {"sharding": "full", "micro_batch": 1, "micro_batches": 4, "sequence": 8192}
    return Training(layout=layout, **usual | {"precision": "bf16"} | values)


@pytest.mark.parametrize(
    ("size", "stride", "within"), [(8, 1, 8), (16, 1, 8), (4, 8, 1), (32, 2, 4), (2, 1, 2)]
)
def test_a_group_knows_how_many_of_it_a_node_has(size, stride, within) -> None:
    assert Group.of(size, stride, 8) == Group(size, within)


def test_a_ring_over_nodes_has_all_their_ports() -> None:
    assert Group(8, 8).ring(H100) == 450e9 * REACHED
    assert Group(64, 8).ring(H100) == 8 * 50e9 * REACHED
    assert Group(8, 1).ring(H100) == 50e9 * REACHED
    assert Group(64, 8).port(H100) == 50e9 * REACHED


def test_a_ring_sends_all_but_ones_own_part() -> None:
    group = Group(4, 4)
    assert group.gather(1e9, H100) == pytest.approx(0.75e9 / (450e9 * REACHED))
    assert group.all_reduce(1e9, H100) == 2 * group.gather(1e9, H100)
    assert Group(1, 1).all_reduce(1e9, H100) == 0


def test_stage_3_gathers_blocks_twice_a_micro_batch_and_stage_2_all_once() -> None:
    full, gradients = (
        communication(LLAMA, training(Layout(dp_shard=8), sharding=sharding), H100, 1.0)
        for sharding in ("full", "gradients")
    )
    blocks = LLAMA.layers * LLAMA.layer_parameters
    again = Group(8, 8).gather(blocks * 2, H100)
    once = Group(8, 8).gather(LLAMA.parameters * 2, H100)
    assert full.gradients == gradients.gradients
    assert gradients.weights == pytest.approx(4 * once)
    assert full.weights == pytest.approx(4 * (once + again))
    assert full.gradients == pytest.approx(4 * 2 * once)  # in fp32, divided in each micro-batch
    assert full.replicas == 0


def test_a_pipeline_s_stages_keep_gathered_weights_for_all_micro_batches() -> None:
    few, many = (
        communication(
            LLAMA,
            training(Layout(pp=2, dp_shard=4), sharding="gradients", micro_batches=number),
            H100,
            1.0,
        )
        for number in (4, 8)
    )
    assert few.weights == many.weights > 0
    assert many.pipeline == 2 * few.pipeline


def test_replicas_add_up_whole_gradients_and_stage_1_gives_weights_out_beside() -> None:
    none = communication(LLAMA, training(Layout(dp_replicate=8), sharding="none"), H100, 1.0)
    first = communication(LLAMA, training(Layout(dp_shard=8), sharding="optimizer"), H100, 1.0)
    assert none.weights == first.weights == none.gradients == first.gradients == 0
    assert first.replicas == pytest.approx(1.5 * none.replicas)


def test_shards_within_nodes_keep_gathers_off_the_network() -> None:
    flat = communication(LLAMA, training(Layout(dp_shard=64)), H100, 1.0)
    within = communication(LLAMA, training(Layout(dp_replicate=8, dp_shard=8)), H100, 1.0)
    assert within.weights < flat.weights


def test_tensor_parallel_sums_twice_a_layer_forward_and_backward() -> None:
    sent = communication(LLAMA, training(Layout(tp=8)), H100, 1.0)
    one = Group(8, 8).all_reduce(8192 * 4096 * 2, H100)
    assert sent.tensor == pytest.approx(4 * (4 * 32 + 2) * one)
    recomputed = training(Layout(tp=8), activation_checkpoint="full")
    assert communication(LLAMA, recomputed, H100, 1.0).tensor == pytest.approx(
        4 * (5.5 * 32 + 2) * one
    )


def test_only_adapters_have_gradients_to_add_up() -> None:
    adapted = training(Layout(dp_replicate=2), sharding="none", adapter=Adapter(kind="lora"))
    sent = communication(LLAMA, adapted, H100, 0.01)
    assert sent.replicas == pytest.approx(Group(2, 2).all_reduce(0.01 * LLAMA.parameters * 4, H100))


def test_a_pipeline_over_nodes_sends_through_the_network() -> None:
    near = communication(LLAMA, training(Layout(pp=8)), H100, 1.0).pipeline
    far = communication(LLAMA, training(Layout(pp=8, tp=8)), H100, 1.0).pipeline
    assert far == pytest.approx(near / 8 * 450 / 50)
    twice = training(Layout(pp=8), schedule="interleaved_1f1b")
    assert communication(LLAMA, twice, H100, 1.0).pipeline == 2 * near


def test_context_parallel_sends_a_number_once_however_many_there_are() -> None:
    slow = replace(H100, link_bandwidth=1e9)
    two, eight = (communication(LLAMA, training(Layout(cp=cp)), slow, 1.0).context for cp in (2, 8))
    # Half of all numbers over two halves, seven eighths over eight parts.
    assert eight / two == pytest.approx((7 / 8 / 8) / (1 / 2 / 2))
