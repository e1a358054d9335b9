"""Folders in the format of compressed-tensors, as transformers and that library read them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelines.core.errors import UserError
from pipelines.export.compressed import export_compressed
from pipelines.models import pretrained
from pipelines.models.served import load_quantized
from tests.unit.export.models import small, tokens, write_registered

CPU = torch.device("cpu")


@torch.no_grad()
def test_transformers_reads_each_weight_to_half_a_step(registered: Path, made: Path) -> None:
    from transformers import AutoModelForCausalLM

    export_compressed(registered, made, 32)
    stored = load_file(made / "model.safetensors")
    before = AutoModelForCausalLM.from_pretrained(registered).state_dict()
    after = load_quantized(made, CPU).state_dict()
    assert after.keys() == before.keys()
    rounded = 0
    for name, weight in before.items():
        scale = stored.get(f"{name}_scale")
        if scale is None:
            assert torch.equal(after[name], weight.to(torch.bfloat16))
            continue
        # The largest weights of a group lie half a step beyond the codes; bfloat16 adds its own.
        step = scale.float().repeat_interleave(32, dim=1)
        assert ((after[name].float() - weight).abs() <= 0.51 * step + weight.abs() / 128).all()
        rounded += 1
    assert rounded == 2 * 7


@torch.no_grad()
def test_what_is_loaded_compressed_computes_the_same(registered: Path, made: Path) -> None:
    from transformers import AutoModelForCausalLM

    export_compressed(registered, made, 64)
    packed = AutoModelForCausalLM.from_pretrained(made)
    assert torch.equal(packed(tokens()).logits, load_quantized(made, CPU)(tokens()).logits)


def test_a_model_in_several_files_keeps_its_index(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    one = write_registered(model, tmp_path / "one")
    monkeypatch.setattr(pretrained, "FILE_BYTES", 60_000)
    several = write_registered(model, tmp_path / "several")
    assert len(list(several.glob("*.safetensors"))) > 2
    whole = tmp_path / "whole"
    whole.mkdir()
    export_compressed(one, whole, 64)
    export_compressed(several, made, 64)
    expected = load_quantized(whole, CPU).state_dict()
    found = load_quantized(made, CPU).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_group_that_does_not_divide_is_refused(registered: Path, made: Path) -> None:
    with pytest.raises(UserError, match=r"--group-size 48: it must be one of 32, 64, 128, 256"):
        export_compressed(registered, made, 48)
    with pytest.raises(UserError, match=r"groups of 128 weights don't divide the 64 inputs of "):
        export_compressed(registered, made, 128)


def test_a_family_without_linear_layers_is_refused(made: Path, tmp_path: Path) -> None:
    source = write_registered(small("gpt2-124m"), tmp_path / "source")
    with pytest.raises(UserError, match="a gpt2 of transformers has no linear layers"):
        export_compressed(source, made)
