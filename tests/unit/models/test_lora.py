from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.families import flags
from pipelines.models.lora import adapted_layers, add_adapters, chosen_sizes, init_adapters
from pipelines.models.presets import PRESETS
from pipelines.models.pretrained import load_pretrained, load_weights, save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.recipe.training_section import Adapter

SHAPE = replace(PRESETS["llama-100k"], width=64, hidden=96).sized(61, 24)


def plain(config: DecoderConfig = SHAPE) -> Transformer:
    model = Transformer(config)
    model.init_weights(1)
    return model.eval()


def adapt(model: Transformer, **adapter: object) -> Transformer:
    """With adapters that do something."""
    chosen = Adapter.model_validate({"kind": "lora", "rank": 4, **adapter})
    add_adapters(model, chosen_sizes(model, chosen), chosen)
    init_adapters(model, seed=3)
    for number, layer in enumerate(adapted_layers(model).values()):
        generator = torch.Generator().manual_seed(number)
        layer.lora_b.weight.data.normal_(0, 0.1, generator=generator)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))


def trained_names(model: Transformer) -> set[str]:
    return {name for name, each in model.named_parameters() if each.requires_grad}


@torch.no_grad()
def test_a_fresh_adapter_changes_nothing_and_all_linear_layers_have_one() -> None:
    model = plain()
    before = model(tokens())
    adapter = Adapter(kind="lora")
    add_adapters(model, chosen_sizes(model, adapter), adapter)
    init_adapters(model, seed=3)
    assert torch.equal(model(tokens()), before)
    assert len(adapted_layers(model)) == 7 * SHAPE.layers
    ends = {name.split(".")[-2] for name in trained_names(model)}
    assert ends == {"lora_a", "lora_b"}


def test_a_is_uniform_and_follows_from_seed_and_name_alone() -> None:
    one, other = adapt(plain()), adapt(plain(), targets=["k_proj"])
    a = adapted_layers(one)["layers.1.self_attn.k_proj"].lora_a.weight
    assert torch.equal(a, adapted_layers(other)["layers.1.self_attn.k_proj"].lora_a.weight)
    assert not torch.equal(a, adapted_layers(one)["layers.0.self_attn.k_proj"].lora_a.weight)
    assert 0.9 / 8 < a.abs().max() <= 1 / 8


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_gradients_flow_to_adapters_only_and_the_base_stays_as_it_is(kind: str) -> None:
    model = adapt(plain(), kind=kind, dropout=0.1).train()
    frozen = {name: each.clone() for name, each in model.state_dict().items() if "lora" not in name}
    adapters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=0.01)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(tokens(), targets_BS=tokens())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    with_gradient = {name for name, each in model.named_parameters() if each.grad is not None}
    assert with_gradient == trained_names(model)
    for name, before in frozen.items():
        assert torch.equal(model.state_dict()[name], before), name


@pytest.mark.parametrize("kind", ["lora", "qlora"])
@torch.no_grad()
def test_merged_logits_are_those_with_adapters(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = adapt(plain(), kind=kind)
    expected = model(tokens())
    save_pretrained(model, tmp_path)  # merges a tensor at a time
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for logits in (load_pretrained(tmp_path)(tokens()), theirs(tokens()).logits):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_a_base_is_loaded_tensor_by_tensor_into_what_the_meta_device_made(
    kind: str, family: str, tmp_path: Path
) -> None:
    preset = {"llama": "llama-100k", "gpt2": "gpt2-124m"}[family]
    config = replace(
        PRESETS[preset],
        layers=2,
        width=64,
        heads=4,
        hidden=96,
        kv_heads=4 if family == "gpt2" else 2,
    ).sized(61, 24)
    base = plain(config)
    save_pretrained(base, tmp_path)
    with torch.device("meta"):
        model = Transformer(config)
        adapter = Adapter.model_validate({"kind": kind})
        add_adapters(model, chosen_sizes(model, adapter), adapter)
    model.to_empty(device="cpu")
    load_weights(model, tmp_path)
    init_adapters(model, seed=3)
    expected = plain(config)
    add_adapters(expected, chosen_sizes(expected, adapter), adapter)
    init_adapters(expected, seed=3)
    assert torch.equal(model.eval()(tokens()), expected(tokens()))


def test_a_base_in_bf16_keeps_adapters_in_fp32() -> None:
    model = plain()
    adapter = Adapter(kind="lora")
    add_adapters(model, chosen_sizes(model, adapter), adapter, torch.bfloat16)
    init_adapters(model, seed=3)
    assert {each.dtype for each in model.parameters() if each.requires_grad} == {torch.float32}
    assert {each.dtype for each in model.parameters() if not each.requires_grad} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens(), targets_BS=tokens())
    loss.backward()
    assert {e.grad.dtype for e in model.parameters() if e.grad is not None} == {torch.float32}


EXPERTS = {"experts": 5, "experts_per_token": 2}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_an_adapted_mixture_learns_what_its_merged_weights_say(family: str) -> None:
    config = replace(SHAPE, **EXPERTS | flags(family) | {"full_attention_every": None})
    model = adapt(plain(config))
    assert len(adapted_layers(model)) == 7 * config.layers
    merged = plain(config)
    for name, layer in adapted_layers(model).items():
        merged.get_parameter(f"{name}.weight").data = layer.whole()
    losses = [each(tokens(), targets_BS=tokens()) for each in (model, merged)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for name, layer in adapted_layers(model).items():
        weight = merged.get_parameter(f"{name}.weight")
        a, b = layer.lora_a.weight, layer.lora_b.weight
        assert a.grad is not None and b.grad is not None and weight.grad is not None
        expected = (
            layer.scale * b.detach().mT @ weight.grad,
            layer.scale * weight.grad @ a.detach().mT,
        )
        torch.testing.assert_close((a.grad, b.grad), expected, atol=1e-3, rtol=1e-3)


def test_experts_below_qlora_are_refused() -> None:
    config = replace(SHAPE, **EXPERTS | flags("mixtral"))
    with pytest.raises(UserError, match=r"qlora: not on layers\.0\.mlp\.\w+, .* set lora, or"):
        adapt(plain(config), kind="qlora")


def test_an_unknown_target_is_one_line() -> None:
    with pytest.raises(UserError, match="named 'c_attn'; there are down_proj, gate_proj, k_proj"):
        adapt(plain(), targets=["q_proj", "c_attn"])


def test_random_weights_below_qlora_are_refused() -> None:
    model = adapt(plain(), kind="qlora")
    with pytest.raises(UserError, match=r"codes is quantised, .* set model\.init_from"):
        model.init_weights(1)
