"""Every family against `transformers`: the same folder gives the same logits in both."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.models import pretrained, transformer
from pipelines.models.attention import attention_mask
from pipelines.models.config import DecoderConfig, RopeScaling, Yarn
from pipelines.models.config_json import write_config
from pipelines.models.families import flags
from pipelines.models.model_folder import load_config
from pipelines.models.norms import ZeroCentredRMSNorm
from pipelines.models.presets import preset
from pipelines.models.pretrained import load_pretrained, load_weights, save_pretrained
from pipelines.models.rotary import rotary_frequencies, rotary_table
from pipelines.models.transformer import Transformer

VOCABULARY, CONTEXT = 61, 24
SIZE = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "hidden": 48,
    "vocab_size": VOCABULARY,
    "context_length": CONTEXT,
}
GROUPED = SIZE | {"kv_heads": 2}
FULL = SIZE | {"kv_heads": 4}
GEMMA3 = GROUPED | flags("gemma3_text")
GEMMA3 |= {"kv_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "full_attention_every": 2}
GEMMA3 |= {"sliding_window": 7}
LLAMA3 = RopeScaling(8.0, 1.0, 4.0, 16)
EXPERTS = {"experts": 5, "experts_per_token": 2}
GPT_OSS = (
    GROUPED | EXPERTS | flags("gpt_oss") | {"head_dim": 16, "kv_heads": 2, "sliding_window": 7}
)
# Bounds of its blend that lie within a head, and a gate that is clamped.
GPT_OSS |= {"rope_scaling": Yarn(4.0, 12, beta_fast=2.0, beta_slow=0.2, truncate=False)}
GPT_OSS |= {"rope_theta": 40.0}
DEEPSEEK = FULL | EXPERTS | flags("deepseek_v3") | {"experts": 8, "n_group": 4, "topk_group": 2}
DEEPSEEK |= {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6}
DEEPSEEK |= {"v_head_dim": 9, "first_k_dense_replace": 1, "dense_hidden": 40}
MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}
SHAPES = {
    "llama2": DecoderConfig(**FULL, tie_embeddings=False),
    "llama3": DecoderConfig(**GROUPED, rope_theta=500_000.0, rope_scaling=LLAMA3),
    "llama-biases": DecoderConfig(**GROUPED, qkv_bias=True, output_bias=True, mlp_bias=True),
    "mistral": DecoderConfig(**GROUPED | flags("mistral") | {"sliding_window": 7}),
    "mistral-full": DecoderConfig(**GROUPED | flags("mistral") | {"sliding_window": None}),
    "qwen2": DecoderConfig(**GROUPED | flags("qwen2") | {"tie_embeddings": True}),
    "qwen3": DecoderConfig(**GROUPED | flags("qwen3") | {"head_dim": 16}),
    "mixtral": DecoderConfig(**GROUPED | EXPERTS | flags("mixtral")),
    "qwen3_moe": DecoderConfig(**GROUPED | EXPERTS | flags("qwen3_moe") | {"head_dim": 16}),
    "gpt_oss": DecoderConfig(**GPT_OSS | {"gate_limit": 0.8}),
    "gpt_oss-truncated": DecoderConfig(
        **GPT_OSS
        | {"rope_scaling": Yarn(4.0, 12, attention_factor=1.25), "qkv_bias": False}
        | {"output_bias": False, "full_attention_every": 3}
    ),
    "deepseek_v3": DecoderConfig(**DEEPSEEK),
    "deepseek_v3-moonlight": DecoderConfig(**DEEPSEEK | MOONLIGHT | {"rope_interleave": False}),
    "deepseek_v3-yarn": DecoderConfig(
        **DEEPSEEK | {"rope_scaling": Yarn(4.0, 12, mscale=1.0, mscale_all_dim=0.7)}
    ),
    "deepseek_v3-yarn-alike": DecoderConfig(
        **DEEPSEEK | {"rope_scaling": Yarn(4.0, 12, mscale=1.0, mscale_all_dim=1.0)}
    ),
    "phi3": DecoderConfig(**GROUPED | flags("phi3") | {"sliding_window": 7}),
    "phi3-partial": DecoderConfig(**GROUPED | flags("phi3"), rotary_fraction=0.75),
    "gemma3": DecoderConfig(**GEMMA3),
    "gemma3-27b": DecoderConfig(**GEMMA3 | {"query_pre_attn_scalar": 11, "rope_divisor": 8.0}),
    "gemma3-windows": DecoderConfig(**GEMMA3 | {"full_attention_every": 6}),
    "gpt2": DecoderConfig(**FULL, **flags("gpt2")),
    "gpt_neox": DecoderConfig(**FULL, **flags("gpt_neox"), rotary_fraction=0.25),
    "gpt_neox-serial": DecoderConfig(**FULL | flags("gpt_neox") | {"parallel_residual": False}),
    "gptj": DecoderConfig(**FULL, **flags("gptj"), rotary_fraction=0.5),
}


def random_model(config: DecoderConfig) -> Transformer:
    """Also norms and biases, and larger than when training begins."""
    torch.manual_seed(5)
    model = Transformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.2)
    for bias in model.balance_biases.values():
        torch.nn.init.normal_(bias, 0.0, 0.2)
    return model.eval()


def theirs_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def perplexity(logits: Tensor, tokens: Tensor) -> float:
    nats = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return math.exp(nats.item())


@pytest.fixture(params=SHAPES)
def config(request: pytest.FixtureRequest) -> DecoderConfig:
    return SHAPES[request.param]


@torch.no_grad()
def test_transformers_reads_ours_and_we_read_theirs(config: DecoderConfig, tmp_path: Path) -> None:
    ours = random_model(config)
    save_pretrained(ours, tmp_path / "ours", end_of_text=0, end_of_answer=3)
    theirs = theirs_of(tmp_path / "ours")
    assert theirs.generation_config.eos_token_id == [3, 0]
    assert theirs.config.eos_token_id == 0
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_pretrained(tmp_path / "theirs").eval()
    assert again.config == ours.config

    tokens = torch.randint(0, VOCABULARY, (3, CONTEXT))
    expected = theirs(tokens).logits
    assert expected.std() > 0.5  # not all alike
    for model in (ours, again):
        torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=0)
        same = pytest.approx(perplexity(expected, tokens), abs=1e-4)
        assert perplexity(model(tokens), tokens) == same


@torch.no_grad()
def test_a_packed_document_is_what_it_is_alone(config: DecoderConfig) -> None:
    model = random_model(config)
    documents = [torch.randint(0, VOCABULARY, (1, length)) for length in (5, 1, 12, 6)]
    numbers = torch.cat([torch.full((1, d.shape[1]), n) for n, d in enumerate(documents)], 1)
    packed = model(torch.cat(documents, 1), numbers)
    alone = torch.cat([model(document) for document in documents], 1)
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=0)


def test_the_config_counts_its_parameters(config: DecoderConfig) -> None:
    assert Transformer(config).parameter_count == config.parameters


def test_stages_hold_together_what_the_whole_holds(config: DecoderConfig, tmp_path: Path) -> None:
    whole = random_model(config)
    save_pretrained(whole, tmp_path)
    stages = [Transformer(config, range(0, 1)), Transformer(config, range(1, 2))]
    for stage in stages:
        load_weights(stage, tmp_path)
    tokens = torch.randint(0, VOCABULARY, (2, CONTEXT))
    assert torch.equal(stages[1](stages[0](tokens)), whole(tokens))
    save_pretrained(stages, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        tmp_path / "model.safetensors"
    ).read_bytes()


def test_large_models_are_several_files(
    config: DecoderConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "FILE_BYTES", 20_000)
    model = random_model(config)
    save_pretrained(model, tmp_path)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 1
    assert sum(map(len, map(load_file, files))) == len(
        json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    )
    again = load_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    theirs = theirs_of(tmp_path)
    tokens = torch.randint(0, VOCABULARY, (1, CONTEXT))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    files[1].unlink()
    with pytest.raises(UserError, match=rf"{files[1].name}: missing"):
        load_pretrained(tmp_path)


def old_gpt2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As on the hub: of the model without head, and with its causal mask."""
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, CONTEXT, CONTEXT).tril() for n in range(2)}
    return {name.removeprefix("transformer."): x for name, x in tensors.items()} | masks


def old_neox(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    layers = "gpt_neox.layers.0.attention."
    return tensors | {
        f"{layers}bias": torch.ones(1, 1, CONTEXT, CONTEXT),
        f"{layers}masked_bias": torch.tensor(-1e9),
        f"{layers}rotary_emb.inv_freq": torch.ones(4),
    }


@pytest.mark.parametrize(("family", "age"), [("gpt2", old_gpt2), ("gpt_neox", old_neox)])
def test_older_files_load(
    family: str, age: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path
) -> None:
    model = random_model(SHAPES[family])
    save_pretrained(model, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(age(load_file(path)), path)
    again = load_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


def test_a_layer_that_guesses_a_further_token_is_left_out(tmp_path: Path) -> None:
    model = random_model(SHAPES["deepseek_v3"])
    save_pretrained(model, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.layers.2.eh_proj.weight": torch.ones(2)}, path)
    again = load_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


OLD_CONFIGS = {
    "llama3.1": (
        {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96}
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
        | {"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
        | {
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_type": "llama3",
            }
        },
        {"rope_theta": 500_000.0, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64), "kv_heads": 2},
    ),
    "pythia": (
        {"model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 96}
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
        | {"max_position_embeddings": 16, "layer_norm_eps": 1e-5, "rotary_pct": 0.5}
        | {"rotary_emb_base": 20_000, "hidden_act": "gelu"},
        {"rotary_fraction": 0.5, "rope_theta": 20_000.0, "qkv_bias": True, "activation": "gelu"},
    ),
    "gemma3-4b": (
        {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96}
        | {"num_hidden_layers": 7, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"vocab_size": 9, "max_position_embeddings": 16, "rms_norm_eps": 1e-6, "head_dim": 16}
        | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}
        | {"rope_theta": 2e6, "rope_local_base_freq": 20_000.0, "sliding_window": 8}
        | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 3},
        {"rope_theta": 2e6, "local_rope_theta": 20_000.0, "rope_divisor": 8.0, "kv_heads": 1}
        | {"full_attention_every": 3, "sliding_window": 8, "activation": "gelu_tanh"}
        | {"tie_embeddings": True, "head_dim": 16, "query_pre_attn_scalar": 16},
    ),
    # As released, but for its sizes and fp8.
    "deepseek-v3": (
        {"model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 96}
        | {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
        | {"vocab_size": 9, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}
        | {"moe_intermediate_size": 32, "n_routed_experts": 16, "num_experts_per_tok": 2}
        | {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "rope_theta": 10000}
        | {"first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
        | {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
        | {"v_head_dim": 8, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1}
        | {"num_nextn_predict_layers": 1, "moe_layer_freq": 1, "tie_word_embeddings": False}
        | {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"}
        | {
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
                "type": "yarn",
            }
        },
        {"rope_scaling": Yarn(40, 16, mscale=1.0, mscale_all_dim=1.0), "rope_interleave": True},
    ),
    # As released, but for its sizes and MXFP4.
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
        | {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"vocab_size": 9, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2}
        | {"attention_bias": True, "attention_dropout": 0.0, "hidden_act": "silu"}
        | {"initial_context_length": 16, "output_router_logits": False, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_theta": 150000, "swiglu_limit": 7.0, "router_aux_loss_coef": 0.9}
        | {
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 16,
                "rope_type": "yarn",
                "truncate": False,
            }
        },
        {"rope_theta": 150_000.0, "rope_scaling": Yarn(32.0, 16, truncate=False), "kv_heads": 1}
        | {"full_attention_every": 2, "sliding_window": 8, "local_rope_theta": None}
        | {"experts": 4, "experts_per_token": 2, "norm_topk_prob": True, "mlp_bias": True}
        | {"qkv_bias": True, "output_bias": True, "sinks": True, "gate_limit": 7.0}
        | {"tie_embeddings": False, "head_dim": 16},
    ),
    "phi3": (
        {"model_type": "phi3", "hidden_size": 64, "intermediate_size": 96, "rope_theta": 10000.0}
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"vocab_size": 9, "max_position_embeddings": 16, "rms_norm_eps": 1e-5}
        | {"original_max_position_embeddings": 16, "partial_rotary_factor": 0.75}
        | {"rope_scaling": None, "sliding_window": 8, "tie_word_embeddings": True},
        {"rotary_fraction": 0.75, "sliding_window": 8, "kv_heads": 1, "tie_embeddings": True},
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 16}
        | {"layer_norm_epsilon": 1e-5, "vocab_size": 9, "n_ctx": 16},
        {"hidden": 256, "tie_embeddings": True, "activation": "gelu_tanh", "positions": "learned"},
    ),
}


@pytest.mark.parametrize("name", OLD_CONFIGS)
def test_older_configs_are_understood(name: str, tmp_path: Path) -> None:
    values, expected = OLD_CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = load_config(tmp_path)
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize("truncate", [False, True])
def test_released_sizes_of_yarn_are_those_of_transformers(truncate: bool) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    config = replace(preset("gpt-oss-20b"), rope_scaling=Yarn(32.0, 4096, truncate=truncate))
    theirs = GptOssRotaryEmbedding(GptOssConfig(**write_config(config, "float32")))
    cos, sin = theirs(torch.zeros(1), torch.arange(0, 131_072, 129).unsqueeze(0))
    found = rotary_table(config)[:, ::129].chunk(2, dim=-1)[0]
    torch.testing.assert_close(found, torch.stack((cos[0], sin[0])), atol=1e-2, rtol=0)
    torch.testing.assert_close(rotary_frequencies(config), theirs.inv_freq, rtol=1e-6, atol=0)


def test_scaled_rotations_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = replace(SHAPES["llama3"], width=256, heads=4, context_length=32)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**write_config(config, "float32")))
    cos, sin = theirs(torch.zeros(1), torch.arange(32).unsqueeze(0))
    rotary = Transformer(config).rotary_2SR
    assert rotary is not None
    torch.testing.assert_close(rotary, torch.stack((cos[0], sin[0])), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "change", "line"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True; only False"),
        ("llama3", {"model_type": "bert"}, "model_type = 'bert'; supported are llama, mistral"),
        ("llama3", {"hidden_act": "relu"}, "hidden_act = 'relu'; only 'silu'"),
        ("llama2", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn'; only"),
        ("phi3", {"rope_scaling": {"type": "su"}, "rope_parameters": None}, "'su'; only 'default'"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "'longrope'; only 'default'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "softcapping = 50.0; only None is supported"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "softcapping = 30.0; only None is supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "only False is supported"),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: only"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 2}, "layer_types: only full_attention"),
        ("gemma3", {"sliding_window": None}, "sliding_window is None, but the other layers"),
        ("gemma3", {"model_type": "gemma3"}, "model_type = 'gemma3'; supported are llama"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "MXFP4 weights; give them in bf16",
        ),
        ("gpt_oss", {"rope_parameters": None}, "rope_type = 'default'; only 'yarn'"),
        (
            "gpt_oss",
            {"rope_parameters": {"rope_type": "yarn"}},
            "factor of rope_type 'yarn' must be",
        ),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0; only 1.702"),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: only"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window is None, but the other layers"),
        ("llama2", {"model_type": "gpt2"}, "n_embd|vocab_size|n_layer"),
        ("llama2", {"model_type": "qwen3"}, r"the tensor model\.layers\.0\.self_attn\.q_norm"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "give .* in bf16"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn"}}, "factor of rope_type 'yarn'"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias = True; only False"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, r"\(8\) \* topk_group\(2\) ÷ n_group\(4\)"),
        ("deepseek_v3", {"v_head_dim": 17}, r"v_head_dim\(17\) must be at most 16"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, r"must be below layers\(2\)"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "only False is supported"),
        ("gpt2", {"n_embd": 64}, "has shape .*, config.json says"),
    ],
)
def test_what_this_decoder_is_not_is_one_line(
    family: str, change: dict[str, Any], line: str, tmp_path: Path
) -> None:
    save_pretrained(random_model(SHAPES[family]), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=line) as error:
        load_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_layers_of_two_kinds_have_two_masks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def noted(*arguments: Any) -> Any:
        built.append(arguments[2])
        return attention_mask(*arguments)

    monkeypatch.setattr(transformer, "attention_mask", noted)
    model = Transformer(replace(SHAPES["gemma3"], layers=6))
    for length, windows in ((CONTEXT, [7, None]), (7, [None])):  # as a window of 7 hides nothing
        built.clear()
        model(torch.zeros((1, length), dtype=torch.int64))
        assert built == windows


def test_norms_are_the_identity_at_first() -> None:
    model = Transformer(SHAPES["gemma3"])
    model.init_weights(0)
    x = torch.nn.functional.normalize(torch.randn(3, 32), dim=1) * math.sqrt(32)
    norms = [each for each in model.modules() if isinstance(each, ZeroCentredRMSNorm)]
    assert len(norms) == 4 * 2 + 2 * 2 + 1
    assert all(not norm.weight.any() for norm in norms)
    torch.testing.assert_close(norms[0](x), x)


def test_a_shape_that_its_family_cannot_say_is_not_saved(tmp_path: Path) -> None:
    model = Transformer(DecoderConfig(**GROUPED, norm="layer"))
    with pytest.raises(UserError, match="norm = 'layer' can't be saved: models of family llama"):
        save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())
