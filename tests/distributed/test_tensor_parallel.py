"""Tensor parallelism gives every family the loss and the gradients of one process."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipelines.loading.dataloader import IGNORED
from pipelines.models import loss
from pipelines.models.config import DecoderConfig
from pipelines.models.families import flags
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.tensor_parallel import tensor_parallel
from tests.distributed.pool import Pool

SIZE = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "kv_heads": 4,
    "hidden": 48,
    "vocab_size": 50,
    "context_length": 16,
}
LLAMA = DecoderConfig(**SIZE | {"kv_heads": 2})  # tied
MODELS = {
    "llama": LLAMA,
    "odd vocabulary": replace(LLAMA, vocab_size=51),
    "mistral": replace(LLAMA, sliding_window=5, tie_embeddings=False),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=16),
    "gemma3": replace(
        DecoderConfig(**SIZE | flags("gemma3_text") | {"kv_heads": 2, "head_dim": 16}),
        sliding_window=5,
        full_attention_every=2,
    ),
    "gpt2": DecoderConfig(**SIZE, **flags("gpt2")),
    "gpt_neox": DecoderConfig(**SIZE, **flags("gpt_neox")),
    "gptj": DecoderConfig(**SIZE, **flags("gptj"), rotary_fraction=0.5),
}


def built(config: DecoderConfig) -> Transformer:
    """In fp64; norms and biases are all different, or parts of them could be mixed up unseen."""
    model = Transformer(config).double()
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.linspace(-0.1, 0.1, len(parameter)))
    return model


def passes(model: Transformer, vocabulary: int) -> Tensor:
    """The loss of three batches, one of several documents, one of a sample, after their backward
    passes.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (3, 17), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :5] = IGNORED
    documents = (torch.arange(16) > 6).int().expand(3, 16).clone()
    total = torch.zeros((), dtype=torch.float64)
    for samples, numbers in ((3, None), (3, documents), (1, None)):
        nats = model(inputs[:samples], numbers, targets[:samples])
        torch.autograd.backward(nats * 0.37)
        total = total + nats.detach()
    return total


def distances(sequence_parallel: bool, chunk: int | None) -> dict[str, tuple[float, float]]:
    """Of each model's loss and gradients from those of the same model alone."""
    mesh = build_mesh(Layout(tp=dist.get_world_size()), torch.device("cpu")).along("tp")
    usual, loss.CHUNK = loss.CHUNK, chunk or loss.CHUNK
    found = {}
    for name, config in MODELS.items():
        alone, divided = built(config), built(config)
        tensor_parallel(divided, mesh, sequence_parallel=sequence_parallel)
        gap = passes(divided, config.vocab_size) - passes(alone, config.vocab_size)
        pairs = zip(divided.parameters(), alone.parameters(), strict=True)
        furthest = max((p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs)
        found[name] = (abs(gap.item()), furthest)
    loss.CHUNK = usual
    return found


@pytest.mark.parametrize(
    ("sequence_parallel", "chunk"),
    [
        pytest.param(True, None, id="sequence parallel"),
        pytest.param(True, 300, id="sequence parallel, loss in chunks", marks=pytest.mark.parity),
        pytest.param(False, 300, id="loss in chunks", marks=pytest.mark.parity),
    ],
)
def test_every_family_has_the_gradients_of_one_process(
    sequence_parallel: bool, chunk: int | None, pool: Callable[[int], Pool]
) -> None:
    for found in pool(2).run(distances, sequence_parallel, chunk):
        assert found.keys() == MODELS.keys()
        for name, (nats, gradient) in found.items():
            assert (nats, gradient) == pytest.approx((0, 0), abs=1e-12), name
