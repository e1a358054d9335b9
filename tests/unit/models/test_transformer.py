import pytest
import torch

from pipelines.models.config import DecoderConfig, Yarn
from pipelines.models.families import flags
from pipelines.models.norms import LayerNorm, RMSNorm, ZeroCentredRMSNorm
from pipelines.models.transformer import Transformer
from tests import varlen_on_cpu

TINY = DecoderConfig(
    layers=2, width=32, heads=4, kv_heads=2, hidden=48, vocab_size=61, context_length=24
)
GEMMA3 = flags("gemma3_text") | {"kv_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 11}
GEMMA3 |= {"sliding_window": 4, "full_attention_every": 2}
GPT_OSS = flags("gpt_oss") | {"kv_heads": 2, "head_dim": 8, "sliding_window": 4}
GPT_OSS |= {"experts": 4, "experts_per_token": 2, "rope_scaling": Yarn(4.0, 8)}


def tiny(**changes: object) -> Transformer:
    model = Transformer(DecoderConfig(**{**TINY.__dict__, **changes}))
    model.init_weights(seed=3)
    return model


def test_the_seed_and_name_give_the_weights_of_a_part() -> None:
    whole = tiny()
    stages = [Transformer(TINY, layers) for layers in (range(0, 0), range(0, 1), range(1, 2))]
    found = {}
    for stage in stages:
        stage.init_weights(seed=3)
        found |= dict(stage.named_parameters())
    # The last stage's copy of a tied head.
    assert torch.equal(found.pop("lm_head.weight"), whole.embed_tokens.weight)
    expected = dict(whole.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_model_is_made_without_memory_and_then_filled() -> None:
    with torch.device("meta"):
        model = Transformer(TINY)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    model.init_weights(seed=3)
    tokens = torch.randint(0, 61, (2, 24))
    assert torch.equal(model(tokens), tiny()(tokens))
    assert model.lm_head.weight is model.embed_tokens.weight


def test_a_token_sees_no_later_one() -> None:
    model = tiny()
    tokens = torch.randint(0, 61, (1, 24))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 61
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_a_packed_document_is_what_it_is_alone() -> None:
    """Positions are relative: where a document stands in a sample changes nothing."""
    model = tiny()
    documents = [torch.randint(0, 61, (1, length)) for length in (7, 1, 11, 5)]
    numbers = torch.cat([torch.full((1, d.shape[1]), n) for n, d in enumerate(documents)], 1)
    packed = model(torch.cat(documents, 1), numbers)
    alone = torch.cat([model(document) for document in documents], 1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    one = model(torch.cat(documents, 1), torch.zeros_like(numbers))
    torch.testing.assert_close(one, model(torch.cat(documents, 1)), atol=1e-5, rtol=0)
    assert not torch.allclose(one[:, 7:], packed[:, 7:], atol=1e-3)


@pytest.mark.parametrize(
    "kind", [{}, {"sliding_window": 4}, GEMMA3], ids=["documents", "window", "gemma3"]
)
def test_sequences_give_the_loss_and_gradients_of_masks(kind: dict) -> None:
    tokens, targets = torch.randint(0, 61, (2, 3, 24))
    documents = (torch.rand(3, 24) < 0.2).cumsum(dim=1)
    found = []
    for most in (None, 24):
        model = tiny(**kind)
        model.most_documents = most
        before = dict(varlen_on_cpu.calls)
        loss = model(tokens, documents, targets)
        loss.backward()
        for name, count in before.items():
            assert varlen_on_cpu.calls[name] - count == (0 if most is None else TINY.layers)
        found.append([loss, *(each.grad for each in model.parameters())])
    for mine, theirs in zip(*found, strict=True):
        # Large terms that nearly cancel each other are added up in another order.
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


def test_the_seed_alone_gives_the_weights() -> None:
    torch.manual_seed(1)
    first = tiny()
    torch.manual_seed(2)
    second = tiny()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_untrained_model_knows_nothing() -> None:
    """Logits near uniform: the loss begins at about the logarithm of the vocabulary."""
    logits = tiny()(torch.randint(0, 61, (4, 24)))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(0, 61, (96,)))
    assert loss.item() == pytest.approx(4.11, abs=0.5)


@pytest.mark.parametrize(
    "kind", [{}, flags("gpt2"), GEMMA3, GPT_OSS], ids=["llama", "gpt2", "gemma3", "gpt_oss"]
)
def test_under_autocast_the_stream_is_in_its_type_and_gradients_are_not(kind: dict) -> None:
    model = tiny(**kind)
    seen = set()
    for module in model.modules():
        if isinstance(module, RMSNorm | LayerNorm | ZeroCentredRMSNorm):
            module.register_forward_hook(
                lambda _, given, out: seen.update({given[0].dtype, out.dtype})
            )
    tokens = torch.randint(0, 61, (2, 25))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens[:, :-1], targets_BS=tokens[:, 1:])
    loss.backward()
    assert seen == {torch.bfloat16}
    assert {each.grad.dtype for each in model.parameters()} == {torch.float32}
    assert loss.dtype == torch.float32
