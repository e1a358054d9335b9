import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash
from pipelines.models.config import DecoderConfig
from pipelines.models.lora import adapted_layers, add_adapters, chosen_sizes, init_adapters
from pipelines.models.peft_format import load_adapter, save_adapter, stored_sizes
from pipelines.models.presets import PRESETS
from pipelines.models.pretrained import load_pretrained, save_pretrained
from pipelines.models.safetensors_files import SafetensorsFiles
from pipelines.models.transformer import Transformer
from pipelines.parallel.pipeline_parallel import part_of
from pipelines.recipe.training_section import Adapter

FAMILIES = {
    "llama": "llama-100k",
    "qwen3": "qwen3-0.6b",
    "phi3": "phi3-mini-4k",
    "gemma3": "gemma3-1b",
    "mixtral": "mixtral-8x7b",
    "qwen3_moe": "qwen3-30b-a3b",
    "gpt-oss": "gpt-oss-20b",
    "deepseek": "deepseek-v3",
    "gpt2": "gpt2-124m",
    "gpt_neox": "pythia-160m",
    "gptj": "gpt-j-6b",
}
TARGETS: dict[str, list[str]] = {
    "all": [],
    "some": ["k_proj", "kv_b_proj", "down_proj"],
    "up": ["up_proj"],
}


EXPERTS = {"experts": 6, "experts_per_token": 2, "head_dim": 16}
LATENTS = {"head_dim": None, "q_lora_rank": 20, "kv_lora_rank": 12, "first_k_dense_replace": 1}
LATENTS |= {"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9, "dense_hidden": 80}
LATENTS |= {"n_group": 1, "topk_group": 1}


def shape(family: str) -> DecoderConfig:
    preset = PRESETS[FAMILIES[family]]
    kv_heads = 4 if family.startswith(("gpt", "deepseek")) else 2
    # Beside the experts of DeepSeek's lie layers that have the experts' names.
    further: dict[str, Any] = {"kv_heads": kv_heads} | (EXPERTS if preset.experts else {})
    further |= LATENTS if family == "deepseek" else {}
    small = replace(preset, layers=2, width=64, heads=4, hidden=96, **further)
    if family == "gemma3":
        small = replace(small, head_dim=16, full_attention_every=2, sliding_window=7)
    return small.sized(61, 24)


def plain(family: str) -> Transformer:
    model = Transformer(shape(family))
    model.init_weights(1)
    return model.eval()


def adapted(family: str, targets: list[str]) -> Transformer:
    """With adapters that do something."""
    model = plain(family)
    known = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = [each for each in targets if each in known]
    adapter = Adapter(kind="lora", rank=4, alpha=6, targets=tuple(targets))
    add_adapters(model, chosen_sizes(model, adapter), adapter)
    init_adapters(model, seed=3)
    for number, layer in enumerate(adapted_layers(model).values()):
        layer.lora_b.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
    return model


def read(folder: Path, model: Transformer) -> Transformer:
    add_adapters(model, stored_sizes(folder, model.config), Adapter(kind="lora"))
    load_adapter(model, folder)
    return model.eval()


def tokens() -> torch.Tensor:
    return torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))


def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_a_part_reads_the_adapters_of_its_own_layers_only(tmp_path: Path, monkeypatch) -> None:
    whole = adapted("llama", [])
    save_adapter(whole, tmp_path)
    part = part_of(adapted("llama", []), range(1, 2))
    seen: list[str] = []
    read_files = SafetensorsFiles.read

    def noted(self: SafetensorsFiles, device: torch.device, names: Any) -> Any:
        seen.extend(names)
        return read_files(self, device, names)

    monkeypatch.setattr(SafetensorsFiles, "read", noted)
    load_adapter(part, tmp_path)
    assert len(seen) == 2 * len(adapted_layers(part))
    assert all("layers.1." in name for name in seen)
    assert torch.equal(
        adapted_layers(part)["layers.1.mlp.up_proj"].lora_b.weight,
        adapted_layers(whole)["layers.1.mlp.up_proj"].lora_b.weight,
    )


@pytest.mark.parametrize("targets", list(TARGETS))
@pytest.mark.parametrize("family", list(FAMILIES))
@torch.no_grad()
def test_peft_reads_ours_and_so_do_we(
    family: str, targets: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    from peft import PeftModel

    ours = adapted(family, TARGETS[targets])
    expected = ours(tokens())
    save_pretrained(plain(family), tmp_path / "base")
    save_adapter(ours, tmp_path / "adapter")
    model = PeftModel.from_pretrained(theirs(tmp_path / "base"), str(tmp_path / "adapter"))
    assert not [str(each.message) for each in recwarn if "adapter keys" in str(each.message)]
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum("lora_A" in name for name in model.state_dict()) == len(stored) / 2
    torch.testing.assert_close(model(tokens()).logits, expected, atol=1e-5, rtol=1e-5)
    again = read(tmp_path / "adapter", plain(family))
    torch.testing.assert_close(again(tokens()), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", list(FAMILIES))
@torch.no_grad()
def test_we_read_what_peft_made(family: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    save_pretrained(plain(family), tmp_path / "base")
    is_mixture = shape(family).experts > 0
    config = LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["q_proj", "q_b_proj", "o_proj"] if is_mixture else "all-linear",
        target_parameters=["experts.gate_up_proj", "experts.down_proj"] if is_mixture else None,
        alpha_pattern={"q_proj|query_key_value|c_attn": 9, "experts.down_proj": 2},
        rank_pattern={"experts.gate_up_proj": 4},
        use_rslora=True,
        fan_in_fan_out=family == "gpt2",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    model = get_peft_model(theirs(tmp_path / "base"), config).eval()
    model.save_pretrained(str(tmp_path / "adapter"))
    ours = read(tmp_path / "adapter", load_pretrained(tmp_path / "base"))
    torch.testing.assert_close(ours(tokens()), model(tokens()).logits, atol=1e-5, rtol=1e-5)


def test_a_folder_depends_on_the_adapter_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_adapter(adapted("llama", []), tmp_path / name)
    assert folder_hash(tmp_path / "one") == folder_hash(tmp_path / "two")
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (4, 6, {})
    assert "q_proj" in config["target_modules"]


def broken(folder: Path, what: str) -> None:
    save_adapter(adapted("llama", []), folder)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = next(iter(tensors))
    if what == "no weights":
        weights.unlink()
    elif what == "half":
        del tensors[first]
        save_file(tensors, weights)
    elif what == "shape":
        save_file({name: each[:, :-1].contiguous() for name, each in tensors.items()}, weights)
    elif what == "json":
        config.write_text("{")
    else:
        key, value = {"dora": ("use_dora", True), "kind": ("peft_type", "IA3")}[what]
        config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("no weights", "no adapter_model.safetensors"),
        ("half", "is not a complete adapter for this model"),
        ("shape", "it belongs to another model"),
        ("json", "not valid JSON"),
        ("dora", "use_dora = True; only False is supported"),
        ("kind", "peft_type = 'IA3'; want 'LORA'"),
    ],
)
def test_a_bad_folder_is_one_line(what: str, line: str, tmp_path: Path) -> None:
    broken(tmp_path, what)
    with pytest.raises(UserError, match=line) as error:
        read(tmp_path, plain("llama"))
    assert "\n" not in str(error.value)


def test_an_adapter_of_another_family_is_refused(tmp_path: Path) -> None:
    save_adapter(adapted("gpt2", []), tmp_path)
    with pytest.raises(UserError, match="is not a complete adapter for this model"):
        read(tmp_path, plain("llama"))
