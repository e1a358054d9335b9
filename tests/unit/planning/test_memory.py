from dataclasses import replace

import pytest
import torch

from pipelines.models.lora import add_adapters, chosen_sizes
from pipelines.models.presets import preset
from pipelines.models.transformer import Transformer
from pipelines.parallel.division import stage_layers
from pipelines.parallel.layout import Layout, Schedule, stage_count, stage_numbers
from pipelines.parallel.pipeline_parallel import part_of
from pipelines.planning.memory import HEADROOM, estimate
from pipelines.planning.memory_activations import kept, logits
from pipelines.planning.memory_state import state_of, update_bytes
from pipelines.planning.memory_training import Training
from pipelines.recipe.training_section import Adapter
from pipelines.training.paged_moments import PAGE

ONE = Training(Layout(), "none", micro_batch=2, micro_batches=1, sequence=64)


def sharded(ways: int, sharding: str) -> Training:
    return replace(ONE, layout=Layout(dp_shard=ways), sharding=sharding, precision="bf16")


def state_gb(training: Training) -> float:
    """Of 7.5 billion numbers; the paper's example has no gathered weights in it."""
    shape = preset("llama2-7b")
    state = state_of(shape, training)
    held = state.weights + state.casts + state.gradients + state.optimizer
    return held / shape.parameters


def test_bytes_a_number_of_zero_1_to_3():
    assert state_gb(replace(ONE, precision="fp32")) == 16
    assert state_gb(sharded(64, "optimizer")) == pytest.approx(4 + 2 + 4 + 8 / 64, abs=0.1)
    assert state_gb(sharded(64, "gradients")) == pytest.approx(16 / 64 + 2, abs=0.2)
    assert state_gb(sharded(64, "full")) == pytest.approx(16 / 64, abs=0.4)


def test_the_parts_add_up_and_the_margin_is_what_a_device_keeps_back():
    memory = estimate(preset("llama3-8b"), sharded(8, "full"))
    assert sum(memory.parts.values()) == pytest.approx(memory.total)
    assert memory.total * HEADROOM == pytest.approx(memory.used)
    assert list(memory.parts) == [
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "buffers",
        "margin",
    ]


def test_gradients_made_anew_are_not_there_while_all_activations_are():
    shape = preset("gpt2-124m")
    long = replace(ONE, sequence=1024)
    many = estimate(shape, long)
    assert (many.moment, many.gradients) == ("loss", 0)
    assert many.logits == 3 * 4 * 2 * 1024 * shape.vocab_size
    few = estimate(shape, replace(ONE, micro_batch=1))
    assert few.moment == "end of the backward pass"
    assert few.gradients > 4 * shape.parameters
    assert few.activations == 0
    waiting = estimate(shape, replace(long, micro_batches=2))
    assert waiting.gradients == 4 * shape.parameters


def test_recomputing_needs_less_and_offloading_less_still():
    shape = preset("llama3-8b")
    one = replace(ONE, sequence=4096, precision="bf16")
    totals = [
        kept(shape, replace(one, activation_checkpoint=kind))
        for kind in ("none", "selective", "full")
    ]
    assert totals[0] > totals[1] > totals[2]
    full = sharded(8, "full")
    assert state_of(shape, replace(full, cpu_offload=True)).optimizer == 0


def test_paged_moments_take_three_pages_while_they_are_updated():
    shape = preset("llama3-8b")
    paged = replace(ONE, paged_moments=True)
    assert state_of(shape, paged).optimizer == 0
    assert update_bytes(shape, paged) == 3 * PAGE * 8
    small = replace(paged, layout=Layout(dp_shard=1024), sharding="full")
    assert update_bytes(shape, small) == pytest.approx(shape.parameters / 1024 * 8)
    on_cpu = replace(paged, on_cpu=True)
    assert state_of(shape, on_cpu).optimizer == state_of(shape, ONE).optimizer


def test_gradients_that_wait_for_further_micro_batches_are_divided_where_weights_are():
    shape = preset("llama3-8b")
    full = sharded(8, "full")
    once, often = (state_of(shape, replace(full, micro_batches=n)) for n in (1, 4))
    assert often.gradients == once.gradients
    assert (once.gradients_at_loss, often.gradients_at_loss) == (0, 4 * shape.parameters / 8)
    ddp = state_of(shape, replace(ONE, layout=Layout(dp_replicate=2), micro_batches=4))
    assert ddp.gradients == ddp.buffers == 4 * shape.parameters  # its buckets
    piped = replace(ONE, layout=Layout(pp=2, dp_shard=8), sharding="full", micro_batches=4)
    assert state_of(shape, piped).gradients > 4 * shape.parameters / 2


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_a_pipeline_are_those_of_its_largest_process(schedule: Schedule, tied: bool):
    shape = replace(preset("llama3-8b"), layers=11, tie_embeddings=tied)
    training = replace(ONE, layout=Layout(pp=4), micro_batches=4, schedule=schedule)
    with torch.device("meta"):
        model = Transformer(shape)
    stages = stage_layers(shape, stage_count(schedule, 4))
    largest = max(
        sum(part_of(model, stages[n]).parameter_count for n in stage_numbers(schedule, 4, rank))
        for rank in range(4)
    )
    assert estimate(shape, training).weights == pytest.approx(4 * largest, rel=1e-3)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
@pytest.mark.parametrize("targets", [(), ("o_proj", "down_proj")])
@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"])
def test_bytes_of_adapters_and_of_what_is_below(kind: str, targets: tuple[str, ...], model: str):
    shape = replace(preset(model), layers=4, vocab_size=4096)
    if shape.experts:
        if kind == "qlora":  # not on experts
            return
        shape = replace(shape, experts=16, n_group=1, topk_group=1)
    adapter = Adapter.model_validate({"kind": kind, "rank": 8, "targets": targets})
    with torch.device("meta"):
        model = Transformer(shape)
        add_adapters(model, chosen_sizes(model, adapter), adapter, torch.bfloat16)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    frozen = sum(each.nbytes for each in model.parameters() if not each.requires_grad)
    state = state_of(shape, replace(ONE, precision="bf16", adapter=adapter))
    assert state.gradients == 4 * trained
    assert state.optimizer == 8 * trained
    assert state.weights + state.casts == pytest.approx(frozen + (4 + 2) * trained, rel=0.01)


def test_the_first_pipeline_stage_holds_a_micro_batch_for_each_stage_behind_it():
    shape = preset("llama3-8b")
    four = replace(ONE, layout=Layout(pp=4), micro_batches=16)
    each = kept(shape, replace(ONE, layout=Layout(pp=4))) / len(stage_layers(shape, 4)[0])
    first = len(stage_layers(shape, 4)[0])  # more than a quarter: it has no head
    assert kept(shape, four) == pytest.approx(4 * first * each)
    assert kept(shape, replace(four, schedule="gpipe")) == pytest.approx(16 * first * each)


def test_each_micro_batch_of_a_pipeline_has_memory_of_its_own_to_receive_into():
    shape = preset("llama3-8b")
    stream = 2 * 64 * shape.width * 2  # samples, tokens, and bytes of a number

    def bytes_of(micro_batches: int, schedule: Schedule = "1f1b") -> float:
        four = replace(ONE, layout=Layout(pp=4), precision="bf16", schedule=schedule)
        return estimate(shape, replace(four, micro_batches=micro_batches)).buffers

    assert bytes_of(32) - bytes_of(8) == 24 * stream  # the gradients from the second stage
    both = bytes_of(32, "interleaved_1f1b") - bytes_of(8, "interleaved_1f1b")
    assert both == 24 * 3 * stream  # of its second stage, which is in the middle, both
    assert estimate(shape, ONE).buffers == estimate(shape, replace(ONE, micro_batches=9)).buffers


def test_context_parallel_processes_divide_activations_logits_and_what_is_sharded():
    shape = preset("llama3-8b")
    long = replace(ONE, sequence=131_072, activation_checkpoint="full")
    alone = estimate(shape, long)
    four = estimate(shape, replace(long, layout=Layout(cp=4), sharding="full"))
    assert four.activations == pytest.approx(alone.activations / 4, rel=0.05)
    assert four.optimizer == alone.optimizer / 4
    replicas = estimate(shape, replace(long, layout=Layout(cp=4)))
    assert replicas.optimizer == alone.optimizer
    short = replace(ONE, layout=Layout(cp=4))  # whose logits are one chunk
    assert logits(shape, short)[0] == logits(shape, ONE)[0] / 4
