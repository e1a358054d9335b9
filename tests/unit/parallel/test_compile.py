from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig, Yarn
from pipelines.models.families import flags
from pipelines.models.transformer import Transformer
from pipelines.parallel.parallelize import check_path, checkpoint_activations, compile_blocks
from tests.compiling import needs_a_linker

SHAPE = DecoderConfig(
    layers=3, width=32, heads=4, kv_heads=2, hidden=48, vocab_size=50, context_length=16
)
EXPERTS = replace(SHAPE, experts=4, experts_per_token=2)
GEMMA3 = replace(
    DecoderConfig(**vars(SHAPE) | flags("gemma3_text") | {"kv_heads": 2, "head_dim": 16}),
    layers=4,
    sliding_window=5,
    full_attention_every=2,
)

LATENTS = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6}
LATENTS |= {"v_head_dim": 9, "first_k_dense_replace": 1, "dense_hidden": 40, "kv_heads": 4}
DEEPSEEK = DecoderConfig(**vars(EXPERTS) | flags("deepseek_v3") | LATENTS | {"n_group": 1})


GPT_OSS = replace(
    DecoderConfig(**vars(EXPERTS) | flags("gpt_oss") | {"kv_heads": 2, "head_dim": 16}),
    layers=4,
    sliding_window=5,
    rope_scaling=Yarn(4.0, 8),
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing compiled before counts, neither here nor on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def build(mode: str = "none", shape: DecoderConfig = SHAPE) -> Transformer:
    model = Transformer(shape)
    model.init_weights(0)
    checkpoint_activations(model.layers.values(), mode)  # type: ignore[arg-type]
    return model


def batch(samples: int, *, documents: bool = False) -> tuple[Tensor, Tensor | None, Tensor]:
    ids = torch.randint(0, 50, (samples, 17), generator=torch.Generator().manual_seed(samples))
    numbers = (torch.arange(16) // 5).int().expand(samples, -1) if documents else None
    return ids[:, :-1], numbers, ids[:, 1:]


def gradients(model: Transformer, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(
    ("mode", "documents"), [("none", False), ("selective", True), ("full", True)]
)
def test_one_graph_serves_all_blocks_without_a_break(
    mode: str, documents: bool, shape: DecoderConfig
) -> None:
    given = batch(4, documents=documents)
    plain = build(shape=shape)
    expected = plain(*given)
    model = build(mode, shape)
    compile_blocks(model, backend="aot_eager")
    loss = model(*given)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # the block's and the loss's
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model, loss), gradients(plain, expected))


@pytest.mark.parametrize("documents", [False, True])
def test_dense_layers_and_mixtures_have_a_graph_each(documents: bool) -> None:
    given = batch(4, documents=documents)
    plain = build(shape=DEEPSEEK)
    expected = plain(*given)
    model = build("selective", DEEPSEEK)
    compile_blocks(model, backend="aot_eager")
    loss = model(*given)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 3  # and the loss's
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model, loss), gradients(plain, expected))


@pytest.mark.parametrize("shape", [GEMMA3, GPT_OSS], ids=["gemma3", "gpt_oss"])
@pytest.mark.parametrize("documents", [False, True])
def test_layers_with_a_window_and_without_have_a_graph_each_at_most(
    documents: bool, shape: DecoderConfig
) -> None:
    given = batch(4, documents=documents)
    plain = build(shape=shape)
    expected = plain(*given)
    model = build("selective", shape)
    compile_blocks(model, backend="aot_eager")
    loss = model(*given)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == (
        2 if documents or shape.sinks else 3
    )  # and the loss's
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model, loss), gradients(plain, expected))


def test_other_sizes_of_micro_batches_make_one_more_graph() -> None:
    model = build()
    compile_blocks(model, backend="aot_eager")
    for samples in (6, 5, 6, 4, 3, 5, 2):
        model(*batch(samples)).backward()
    assert counters["stats"]["unique_graphs"] == 4  # of block and loss, each fixed and for all


def test_a_graph_break_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    forward = model.layers["0"].mlp.forward
    monkeypatch.setattr(
        model.layers["0"].mlp, "forward", lambda x: (torch._dynamo.graph_break(), forward(x))[1]
    )
    compile_blocks(model, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(*batch(2))


def test_names_stay() -> None:
    model = build("full")
    compile_blocks(model)
    assert model.state_dict().keys() == build().state_dict().keys()


def test_a_path_with_a_space_is_one_line() -> None:
    folder = Path("/a b/site-packages/torch")
    with pytest.raises(UserError, match=r"train\.compile: .* a path with a space"):
        check_path(torch.device("cpu"), folder)
    check_path(torch.device("cuda"), folder)
    check_path(torch.device("cpu"), Path("/ab/torch"))


@needs_a_linker
def test_the_next_run_finds_what_was_compiled() -> None:
    """With the compiler that runs use; on this machine's CPU it needs a C++ compiler."""
    losses = []
    for _ in range(2):
        torch._dynamo.reset()  # as in a new process
        counters.clear()
        model = build("selective")
        compile_blocks(model)
        loss = model(*batch(4))
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(losses[0], build()(*batch(4)))
    assert torch.equal(losses[0], losses[1])
    assert not counters["inductor"]["fxgraph_cache_miss"]
    assert (
        counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    )
