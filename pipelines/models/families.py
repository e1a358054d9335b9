"""Model families of Hugging Face: what each writes in `config.json`, and how it names its tensors.

One table serves reading and writing. It imports no torch, so an unsuitable folder is refused before
anything starts. A package of a team's own adds a family as an extension: docs/extensions.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.core import extensions
from pipelines.core.errors import UserError

SHAPE = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "hidden": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
OPENAI_SHAPE = {
    "vocab_size": "vocab_size",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "context_length": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
_GPT = {"norm": "layer", "gated": False, "mlp_bias": True}
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_BIASES = ("qkv_bias", "output_bias")
_GATED = ("gate", "up", "down")
_NUMBERED = {"mlp.router": "mlp.gate"} | {
    f"mlp.{each}_proj": f"mlp.experts.{{}}.{each}_proj" for each in _GATED
}
_FULL_ATTENTION = {"use_sliding_window": False}
_DEEPSEEK = (
    {"q_lora_rank": 1536, "kv_lora_rank": 512, "rope_interleave": True, "norm_topk_prob": True}
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_shared_experts": 1}
    | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3}
)
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
# As modules of `transformers` hold a mixture's experts.
TOGETHER = {"mlp.experts.gate_up_proj": _GATE_UP, "mlp.experts.down_proj": ("mlp.down_proj",)}


@dataclass(frozen=True)
class TensorNames:
    """The names that a family gives its modules; the default is Llama's.

    Attributes:
        base: The prefix of every name but the head's; files of a model without a head lack it.
        outside: Maps canonical names to the family's, for modules outside the layers.
        layers: The family's name for the list of layers.
        inside: The same map for modules in a layer; a module that is not in it keeps its name.
            Where each expert has a tensor of its own, `{}` stands for its number.
        fused: Modules that hold several others, by the family's name, with the canonical names of
            those; they lie one after the other. Those of all experts are stored [E, in, out], and
            their outputs take turns.
        by_head: Whether they lie so within each head, for queries, keys and values.
        transposed: Modules whose weights are stored [in, out].
    """

    base: str = "model"
    outside: Mapping[str, str] = field(
        default_factory=lambda: {"embed_tokens": "embed_tokens", "norm": "norm"}
    )
    layers: str = "layers"
    inside: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_head: bool = False
    transposed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """How Hugging Face's files describe the models of one family.

    Attributes:
        architecture: The class in `transformers`.
        names: The names of its tensors.
        shape: The key of each required field of a `DecoderConfig` in `config.json`, all numbers
            above 0.
        renamed: Keys that some files have in place of those above, and the latter.
        flags: Fields whose values all models of the family share.
        options: Optional keys: the fields that each sets, and its default.
        fixed: Optional keys that must have this value if present; they are also written.
        activation: The key and its default.
        has_rope: Whether `rope_parameters` are written.
        rope_types: The supported ways to scale rotary positions; the last is `rope_scaling`'s.
        rotary_fraction: The key of older files for the share of a head that is rotated, and its
            default; None if it is all.
        presets: For a family of a team's own package: the fields of each preset, by its name.
    """

    architecture: str
    names: TensorNames = TensorNames()
    shape: Mapping[str, str] = field(default_factory=lambda: SHAPE)
    renamed: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, tuple[tuple[str, ...], Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    has_rope: bool = True
    rope_types: tuple[str, ...] = ("default", "llama3")
    rotary_fraction: tuple[str, float] | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_UNTIED = {"tie_word_embeddings": (("tie_embeddings",), False)}
_GROUPED = {
    **_UNTIED,
    "num_key_value_heads": (("kv_heads",), None),
    "head_dim": (("head_dim",), None),
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        options={
            **_GROUPED,
            "attention_bias": (_BIASES, False),
            "mlp_bias": (("mlp_bias",), False),
        },
    ),
    "mistral": Family(
        "MistralForCausalLM",
        options={**_GROUPED, "sliding_window": (("sliding_window",), 4096)},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", flags={"qkv_bias": True}, options=_GROUPED, fixed=_FULL_ATTENTION
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        flags={"qk_norm": True},
        options={
            **_GROUPED,
            "head_dim": (("head_dim",), 128),
            "attention_bias": (_BIASES, False),
        },
        fixed=_FULL_ATTENTION,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        names=TensorNames(
            inside={
                "mlp.router": "block_sparse_moe.gate",
                "mlp.gate_proj": "block_sparse_moe.experts.{}.w1",
                "mlp.up_proj": "block_sparse_moe.experts.{}.w3",
                "mlp.down_proj": "block_sparse_moe.experts.{}.w2",
            },
        ),
        shape=SHAPE | {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        flags={"norm_topk_prob": True},
        options={**_GROUPED, "sliding_window": (("sliding_window",), None)},
        fixed={"router_jitter_noise": 0.0},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        names=TensorNames(inside=_NUMBERED),
        shape=SHAPE
        | {
            "hidden": "moe_intermediate_size",
            "experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
        },
        renamed={"num_local_experts": "num_experts"},  # as `transformers` 5 writes it
        flags={"qk_norm": True},
        options={
            **_GROUPED,
            "norm_topk_prob": (("norm_topk_prob",), False),
            "attention_bias": (_BIASES, False),
        },
        fixed={**_FULL_ATTENTION, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        names=TensorNames(fused=TOGETHER),
        shape=SHAPE | {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        flags={"full_attention_every": 2, "mlp_bias": True, "norm_topk_prob": True, "sinks": True},
        options={
            **_GROUPED,
            "attention_bias": (_BIASES, True),
            "sliding_window": (("sliding_window",), 128),
            "rope_theta": (("rope_theta",), 150_000.0),
            "swiglu_limit": (("gate_limit",), 7.0),
        },
        fixed={"swiglu_alpha": 1.702},
        rope_types=("yarn",),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        names=TensorNames(
            inside=_NUMBERED
            | {f"shared_experts.{each}_proj": f"mlp.shared_experts.{each}_proj" for each in _GATED},
            fused={
                "self_attn.kv_a_proj_with_mqa": ("self_attn.kv_a_proj", "self_attn.k_rope_proj")
            },
        ),
        shape=SHAPE
        | {"kv_heads": "num_key_value_heads", "hidden": "moe_intermediate_size"}
        | {"dense_hidden": "intermediate_size", "experts": "n_routed_experts"}
        | {"experts_per_token": "num_experts_per_tok"},
        flags={"sigmoid_router": True},
        options=_UNTIED | {key: ((key,), default) for key, default in _DEEPSEEK.items()},
        fixed={"attention_bias": False},
        rope_types=("default", "yarn"),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        names=TensorNames(fused={"self_attn.qkv_proj": _QKV, "mlp.gate_up_proj": _GATE_UP}),
        options={
            **_UNTIED,
            "num_key_value_heads": (("kv_heads",), None),
            "sliding_window": (("sliding_window",), None),
        },
        rope_types=("default",),
        rotary_fraction=("partial_rotary_factor", 1.0),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        names=TensorNames(
            inside={
                "post_attention_layernorm": "pre_feedforward_layernorm",
                "attention_out_norm": "post_attention_layernorm",
                "mlp_out_norm": "post_feedforward_layernorm",
            }
        ),
        flags={"zero_centred_norms": True, "branch_norms": True, "qk_norm": True}
        | {"scaled_embeddings": True},
        options={
            "tie_word_embeddings": (("tie_embeddings",), True),
            "num_key_value_heads": (("kv_heads",), 4),
            "head_dim": (("head_dim",), 256),
            "query_pre_attn_scalar": (("query_pre_attn_scalar",), 256),
            "attention_bias": (_BIASES, False),
            "sliding_window": (("sliding_window",), 4096),
            "sliding_window_pattern": (("full_attention_every",), 6),
            "rope_theta": (("rope_theta",), 1e6),
            "rope_local_base_freq": (("local_rope_theta",), 10_000.0),
        },
        fixed={
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        rope_types=("default", "linear"),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        names=TensorNames(
            "transformer",
            {"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"},
            layers="h",
            inside={
                "input_layernorm": "ln_1",
                "self_attn.o_proj": "attn.c_proj",
                "post_attention_layernorm": "ln_2",
                "mlp.up_proj": "mlp.c_fc",
                "mlp.down_proj": "mlp.c_proj",
            },
            fused={"attn.c_attn": _QKV},
            transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        ),
        shape=OPENAI_SHAPE,
        flags={**_GPT, "positions": "learned", "qkv_bias": True, "output_bias": True},
        options={
            "n_inner": (("hidden",), None),
            "tie_word_embeddings": (("tie_embeddings",), True),
        },
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        activation=("activation_function", "gelu_new"),
        has_rope=False,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        names=TensorNames(
            "gpt_neox",
            {"embed_tokens": "embed_in", "norm": "final_layer_norm"},
            inside={
                "self_attn.o_proj": "attention.dense",
                "post_attention_layernorm": "post_attention_layernorm",
                "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
            },
            fused={"attention.query_key_value": _QKV},
            by_head=True,
        ),
        shape={**SHAPE, "norm_eps": "layer_norm_eps"},
        flags=_GPT,
        options={
            **_UNTIED,
            "attention_bias": (_BIASES, True),
            "use_parallel_residual": (("parallel_residual",), True),
        },
        activation=("hidden_act", "gelu"),
        rotary_fraction=("rotary_pct", 0.25),
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        names=TensorNames(
            "transformer",
            {"embed_tokens": "wte", "norm": "ln_f"},
            layers="h",
            inside={
                "input_layernorm": "ln_1",
                "self_attn.q_proj": "attn.q_proj",
                "self_attn.k_proj": "attn.k_proj",
                "self_attn.v_proj": "attn.v_proj",
                "self_attn.o_proj": "attn.out_proj",
                "mlp.up_proj": "mlp.fc_in",
                "mlp.down_proj": "mlp.fc_out",
            },
        ),
        shape=OPENAI_SHAPE,
        flags={**_GPT, "head_bias": True, "parallel_residual": True, "shared_norm": True}
        | {"rope_interleave": True},
        options={**_UNTIED, "n_inner": (("hidden",), None)},
        activation=("activation_function", "gelu_new"),
        has_rope=False,
    ),
}


def find_family(name: Any) -> Family:
    """Return the family of a `model_type`, Penstock's own or an extension.

    Raises:
        UserError: It is neither.
    """
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    own = extensions.names("families")
    if name not in own:
        raise UserError(f"model_type = {name!r}; supported are {', '.join((*FAMILIES, *own))}")
    family: Family = extensions.load("families", name)
    return family


def flags(name: str) -> dict[str, Any]:
    """Return the fields that a family's models share, and the defaults of their options."""
    family = find_family(name)
    made = {"family": name, **family.flags}
    for fields, default in family.options.values():
        made |= dict.fromkeys(fields, default) if default is not None else {}
    return made | {"activation": ACTIVATIONS[family.activation[1]]}
