from pathlib import Path

import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.presets import PRESETS, preset
from pipelines.models.transformer import Transformer

TINY = DecoderConfig(
    layers=2, width=32, heads=4, kv_heads=2, hidden=48, vocab_size=61, context_length=24
)


def tiny(**changes: object) -> Transformer:
    model = Transformer(DecoderConfig(**{**TINY.__dict__, **changes}))
    model.init_weights(seed=3)
    return model


def test_the_preset_counts_its_parameters() -> None:
    for shape in (TINY, *(shape.sized(300, 16) for shape in PRESETS.values())):
        assert Transformer(shape).parameter_count == shape.parameters
    untied = tiny(tie_embeddings=False)
    assert untied.parameter_count == untied.config.parameters


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean llama-1m"):
        preset("llama1m")


def test_presets_import_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, pipelines.models.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path.cwd()).returncode == 0


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
