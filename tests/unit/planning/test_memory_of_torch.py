"""The formulas against what torch counts: on the meta device, on the CPU, and on a GPU."""

from dataclasses import replace

import pytest
import torch

from pipelines.models.config import DecoderConfig
from pipelines.models.families import flags
from pipelines.models.presets import PRESETS, preset
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import Layout
from pipelines.planning.memory import estimate
from pipelines.planning.memory_state import state_of
from pipelines.planning.memory_training import Training
from pipelines.recipe.recipe import Recipe
from tests.compiling import needs_a_linker
from tests.settled import FP32
from tests.unit.planning.training_step import peak_bytes, reported, training_of

pytestmark = pytest.mark.long

WITHIN = 0.1
# The smallest of which a tenth is more than the tensors that no formula names.
SIZES = {"width": 256, "heads": 8, "context_length": 128}
LLAMA = DecoderConfig(layers=2, kv_heads=4, hidden=704, vocab_size=4096, **SIZES)
BYTES = replace(LLAMA, vocab_size=256)
UNTIED = replace(LLAMA, vocab_size=16_384, tie_embeddings=False)

DEEPSEEK = DecoderConfig(
    **vars(LLAMA)
    | flags("deepseek_v3")
    | {"layers": 3, "kv_heads": 8, "kv_lora_rank": 128, "q_lora_rank": 192, "v_head_dim": 32}
    | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "dense_hidden": 1024, "hidden": 256}
    | {"experts": 8, "experts_per_token": 3, "n_group": 1, "first_k_dense_replace": 1}
)


def small(name: str) -> DecoderConfig:
    shape = preset(name)
    kv_heads = 4 if shape.kv_heads < shape.heads else 8
    head_dim = 32 if shape.head_dim else None
    return replace(
        shape, layers=2, kv_heads=kv_heads, hidden=1024, vocab_size=4096, head_dim=head_dim, **SIZES
    )


FEW_EXPERTS = replace(
    small("gpt-oss-20b"), hidden=512, experts=4, experts_per_token=2, sliding_window=32
)


def run(micro: int, batch: int, sequence: int = 128, adapter: object = None, **train) -> Recipe:
    sizes = {"micro_batch_size": micro, "global_batch_size": batch, "warmup_steps": 2}
    return Recipe.model_validate(
        {
            "name": "t",
            "data": {"sequence_length": sequence},
            "train": FP32 | sizes | train,
            "adapter": adapter or {},
        }
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_s_state_is_what_torch_counts(name: str) -> None:
    shape = PRESETS[name]
    if not shape.vocab_size:
        shape = shape.sized(vocab_size=32_000, context_length=2048)
    shape = replace(shape, layers=min(shape.layers, 4))  # the others are alike
    with torch.device("meta"):
        model = Transformer(shape)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.step()
    moments = [
        state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    ]
    state = state_of(shape, Training(Layout(), "none", 1, 1, shape.context_length))
    weights = sum(each.nbytes for each in model.parameters())
    assert state.weights == pytest.approx(weights, rel=WITHIN / 1e6)
    assert state.gradients == pytest.approx(weights, rel=WITHIN / 1e6)
    assert state.optimizer == pytest.approx(sum(each.nbytes for each in moments), rel=WITHIN / 1e6)


@pytest.mark.parametrize(
    ("shape", "recipe"),
    [
        pytest.param(LLAMA, run(4, 4), id="llama"),
        pytest.param(LLAMA, run(2, 4, precision="bf16"), id="llama-bf16-accumulating"),
        pytest.param(LLAMA, run(1, 1, sequence=64), id="llama-few-tokens"),
        pytest.param(
            BYTES, run(8, 8, precision="bf16", activation_checkpoint="full"), id="bytes-full-bf16"
        ),
        pytest.param(BYTES, run(8, 8, activation_checkpoint="selective"), id="bytes-selective"),
        pytest.param(UNTIED, run(1, 1, precision="bf16"), id="untied-vocabulary-bf16"),
        pytest.param(LLAMA, run(4, 4, optimizer="muon"), id="llama-muon"),
        pytest.param(
            UNTIED,
            run(1, 2, precision="bf16", adapter={"kind": "qlora", "rank": 8}),
            id="qlora-bf16",
        ),
        pytest.param(LLAMA, run(4, 4, adapter={"kind": "lora", "rank": 8}), id="lora"),
        pytest.param(small("gpt2-124m"), run(2, 2, precision="bf16"), id="gpt2-bf16"),
        pytest.param(small("qwen3-0.6b"), run(2, 2, precision="bf16"), id="qwen3-bf16"),
        pytest.param(small("gemma3-1b"), run(2, 2, precision="bf16"), id="gemma3-bf16"),
        pytest.param(small("gemma3-1b"), run(4, 4), id="gemma3"),
        pytest.param(FEW_EXPERTS, run(2, 2, precision="bf16"), id="gpt-oss-bf16"),
        pytest.param(FEW_EXPERTS, run(4, 4), id="gpt-oss"),
        pytest.param(
            FEW_EXPERTS,
            run(4, 4, adapter={"kind": "lora", "rank": 8}),
            id="gpt-oss-lora",
        ),
        pytest.param(
            FEW_EXPERTS,
            run(4, 4, precision="bf16", compile=True),
            id="gpt-oss-compiled-bf16",
            marks=needs_a_linker,
        ),
        pytest.param(DEEPSEEK, run(4, 4), id="deepseek"),
        pytest.param(DEEPSEEK, run(4, 4, precision="bf16"), id="deepseek-bf16"),
        pytest.param(DEEPSEEK, run(4, 4, adapter={"kind": "lora", "rank": 8}), id="deepseek-lora"),
        pytest.param(
            small("gemma3-1b"),
            run(4, 4, precision="bf16", compile=True),
            id="gemma3-compiled-bf16",
            marks=needs_a_linker,
        ),
        pytest.param(
            LLAMA,
            run(4, 4, precision="bf16", compile=True),
            id="compiled-bf16",
            marks=needs_a_linker,
        ),
        pytest.param(
            LLAMA,
            run(4, 8, precision="bf16", compile=True, activation_checkpoint="selective"),
            id="compiled-selective-accumulating",
            marks=needs_a_linker,
        ),
        pytest.param(small("gpt-j-6b"), run(4, 4), id="gpt-j"),
        pytest.param(small("gpt-neox-20b"), run(4, 8), id="gpt-neox-accumulating"),
    ],
)
def test_the_peak_of_a_step_on_the_cpu(shape: DecoderConfig, recipe: Recipe, tmp_path) -> None:
    measured = peak_bytes(shape, recipe, torch.device("cpu"), tmp_path)
    predicted = estimate(shape, training_of(recipe, on_cpu=True)).used
    assert predicted == pytest.approx(measured, rel=WITHIN)


def test_what_a_run_on_a_cpu_reports_is_what_is_predicted(tmp_path) -> None:
    """And not the memory of Python and of torch, which is hundreds of MiB."""
    recipe = run(4, 4, steps=3, log_every=1)
    points = reported(LLAMA, recipe, tmp_path)
    predicted = estimate(LLAMA, training_of(recipe, on_cpu=True)).used
    assert points[0].memory_bytes is None
    assert points[-1].memory_bytes == pytest.approx(predicted, rel=WITHIN)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("gpt2-124m", run(8, 8, sequence=1024, precision="bf16")),
        ("gpt2-124m", run(16, 32, sequence=1024, precision="bf16")),
        ("qwen3-0.6b", run(4, 4, sequence=1024)),
        ("llama-1b", run(4, 8, sequence=2048, precision="bf16", activation_checkpoint="full")),
        (
            "llama-1b",
            run(4, 4, sequence=2048, precision="bf16", adapter={"kind": "lora", "rank": 16}),
        ),
    ],
)
def test_the_peak_of_a_step_on_a_gpu(name: str, recipe: Recipe, tmp_path) -> None:
    shape = replace(preset(name), context_length=recipe.data.sequence_length)
    measured = peak_bytes(shape, recipe, torch.device("cuda", 0), tmp_path)
    predicted = estimate(shape, training_of(recipe, on_cpu=False)).used
    assert predicted == pytest.approx(measured, rel=WITHIN)
