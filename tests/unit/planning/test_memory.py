from dataclasses import replace

import pytest
import torch

from pipelines.core.recipe_training import Adapter
from pipelines.distributed.layout import Layout
from pipelines.distributed.stages import Schedule, stage_count, stage_numbers
from pipelines.models.config import DecoderConfig
from pipelines.models.division import stage_layers
from pipelines.models.lora import add_adapters, chosen_sizes
from pipelines.models.pipeline_plan import part_of
from pipelines.models.presets import preset
from pipelines.models.transformer import Transformer
from pipelines.planning.memory import Training, estimate

ONE = Training(Layout(), "none", micro_batch=2, micro_batches=1, sequence=64)


def sharded(ways: int, sharding: str) -> Training:
    return replace(ONE, layout=Layout(dp_shard=ways), sharding=sharding, precision="bf16")


def state_gb(training: Training) -> float:
    """Of 7.5 billion numbers; the paper's example has no gathered weights in it."""
    shape = preset("llama2-7b")
    memory = estimate(shape, training)
    return (memory.weights + memory.gradients + memory.optimizer) / shape.parameters


def test_bytes_a_number_of_zero_1_to_3():
    assert state_gb(replace(ONE, precision="fp32")) == 16
    assert state_gb(sharded(64, "optimizer")) == pytest.approx(4 + 2 + 4 + 8 / 64)
    assert state_gb(sharded(64, "gradients")) == pytest.approx(16 / 64 + 2, abs=0.2)
    assert state_gb(sharded(64, "full")) == pytest.approx(16 / 64, abs=0.4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_activations_are_what_autograd_saves(family):
    """The formula against the bytes that a forward pass really keeps."""
    if family == "llama":
        shape = DecoderConfig(layers=3, width=128, heads=4, kv_heads=2, hidden=352)
    else:
        shape = replace(preset("gpt2-124m"), layers=3, width=128, heads=4, kv_heads=4, hidden=512)
    shape = shape.sized(vocab_size=50, context_length=64)
    model = Transformer(shape)
    weights = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(torch.zeros(2, 64, dtype=torch.int64))
    measured = sum(saved.values())
    assert logits.grad_fn is not None
    assert estimate(shape, ONE).activations == pytest.approx(measured, rel=0.15)


def test_recomputing_needs_less_and_offloading_less_still():
    shape = preset("llama3-8b")
    one = replace(ONE, sequence=4096, precision="bf16")
    totals = [
        estimate(shape, replace(one, activation_checkpoint=kind)).activations
        for kind in ("none", "selective", "full")
    ]
    assert totals[0] > totals[1] > totals[2]
    full = sharded(8, "full")
    assert estimate(shape, replace(full, cpu_offload=True)).optimizer == 0


def test_gradients_that_wait_for_further_micro_batches_are_whole():
    shape = preset("llama3-8b")
    full = sharded(8, "full")
    once, often = (estimate(shape, replace(full, micro_batches=n)).gradients for n in (1, 4))
    assert often == 4 * shape.parameters
    assert once < often / 3
    ddp = replace(ONE, layout=Layout(dp_replicate=2), micro_batches=4)
    assert estimate(shape, ddp).gradients == 2 * often  # and its buckets


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
@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_bytes_of_adapters_and_of_what_is_below(kind: str, targets: tuple[str, ...]):
    shape = replace(preset("llama3-8b"), layers=3, vocab_size=4096)
    adapter = Adapter.model_validate({"kind": kind, "rank": 8, "targets": targets})
    with torch.device("meta"):
        model = Transformer(shape)
        add_adapters(model, chosen_sizes(model, adapter), adapter, torch.bfloat16)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    frozen = sum(each.nbytes for each in model.parameters() if not each.requires_grad)
    memory = estimate(shape, replace(ONE, precision="bf16", adapter=adapter))
    assert memory.gradients == 4 * trained
    assert memory.optimizer == 8 * trained
    assert memory.weights == pytest.approx(frozen + (4 + 2) * trained, rel=0.01)


def test_the_first_pipeline_stage_holds_a_micro_batch_for_each_stage_behind_it():
    shape = preset("llama3-8b")
    four = replace(ONE, layout=Layout(pp=4), micro_batches=16)
    alone = estimate(shape, ONE).activations
    first = len(stage_layers(shape, 4)[0]) / shape.layers  # more than a quarter: it has no head
    assert estimate(shape, four).activations == pytest.approx(4 * first * alone)
    gpipe = replace(four, schedule="gpipe")
    assert estimate(shape, gpipe).activations == pytest.approx(16 * first * alone)


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
    assert estimate(shape, short).logits == estimate(shape, ONE).logits / 4
