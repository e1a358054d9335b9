"""Model families in Hugging Face's `config.json`: one table serves reading and writing.

It imports no torch, so an unsuitable folder is refused before anything starts.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig, Family, RopeScaling

_SHAPE = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "hidden": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_OPENAI_SHAPE = {
    "vocab_size": "vocab_size",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "context_length": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
_GPT = {"norm": "layer", "gated": False, "mlp_bias": True}
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_BIASES = ("qkv_bias", "output_bias")
_FULL_ATTENTION = {"use_sliding_window": False}


@dataclass(frozen=True)
class _Format:
    """How one family's `config.json` names the fields of a `DecoderConfig`.

    Attributes:
        architecture: The class in `transformers`.
        shape: The key of each required field, all numbers above 0.
        flags: Fields whose values all models of the family share.
        options: Optional keys: the fields that each sets, and its default.
        fixed: Optional keys that must have this value if present; they are also written.
        activation: The key and its default.
        has_rope: Whether `rope_parameters` are written.
    """

    architecture: str
    shape: Mapping[str, str] = field(default_factory=lambda: _SHAPE)
    flags: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, tuple[tuple[str, ...], Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    has_rope: bool = True


_UNTIED = {"tie_word_embeddings": (("tie_embeddings",), False)}
_GROUPED = {
    **_UNTIED,
    "num_key_value_heads": (("kv_heads",), None),
    "head_dim": (("head_dim",), None),
}

_FORMATS: dict[Family, _Format] = {
    "llama": _Format(
        "LlamaForCausalLM",
        options={
            **_GROUPED,
            "attention_bias": (_BIASES, False),
            "mlp_bias": (("mlp_bias",), False),
        },
    ),
    "mistral": _Format(
        "MistralForCausalLM",
        options={**_GROUPED, "sliding_window": (("sliding_window",), 4096)},
    ),
    "qwen2": _Format(
        "Qwen2ForCausalLM", flags={"qkv_bias": True}, options=_GROUPED, fixed=_FULL_ATTENTION
    ),
    "qwen3": _Format(
        "Qwen3ForCausalLM",
        flags={"qk_norm": True},
        options={
            **_GROUPED,
            "head_dim": (("head_dim",), 128),
            "attention_bias": (_BIASES, False),
        },
        fixed=_FULL_ATTENTION,
    ),
    "gpt2": _Format(
        "GPT2LMHeadModel",
        shape=_OPENAI_SHAPE,
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
    "gpt_neox": _Format(
        "GPTNeoXForCausalLM",
        shape={**_SHAPE, "norm_eps": "layer_norm_eps"},
        flags=_GPT,
        options={
            **_UNTIED,
            "attention_bias": (_BIASES, True),
            "use_parallel_residual": (("parallel_residual",), True),
        },
        activation=("hidden_act", "gelu"),
    ),
    "gptj": _Format(
        "GPTJForCausalLM",
        shape=_OPENAI_SHAPE,
        flags={**_GPT, "head_bias": True, "parallel_residual": True, "shared_norm": True},
        options={**_UNTIED, "n_inner": (("hidden",), None)},
        activation=("activation_function", "gelu_new"),
        has_rope=False,
    ),
}


def flags(family: Family) -> dict[str, Any]:
    """Return the fields that a family's models share, and the defaults of their options."""
    chosen = _FORMATS[family]
    made = {"family": family, **chosen.flags}
    for fields, default in chosen.options.values():
        made |= dict.fromkeys(fields, default) if default is not None else {}
    return made | {"activation": _ACTIVATIONS[chosen.activation[1]]}


def read_config(values: Mapping[str, Any], path: Path) -> DecoderConfig:
    """Return the decoder that a `config.json` describes.

    Raises:
        UserError: the family is unknown, or a key has a value that this decoder doesn't support.
    """
    family = values.get("model_type")
    if family not in _FORMATS:
        known = ", ".join(get_args(Family))
        raise UserError(f"{path}: model_type = {family!r}; supported are {known}")
    chosen = _FORMATS[family]
    for key in chosen.shape.values():
        if not isinstance(values.get(key), int | float) or values[key] <= 0:
            raise UserError(f"{path}: {key} = {values.get(key)!r}; it must be a number above 0")
    for key, wanted in chosen.fixed.items():
        _demand(path, key, values.get(key, wanted), (wanted,))
    fields = {"family": family, **chosen.flags}
    fields |= {name: values[key] for name, key in chosen.shape.items()}
    for key, (names, default) in chosen.options.items():
        fields |= dict.fromkeys(names, values.get(key, default))
    key, default = chosen.activation
    activation = values.get(key, default)
    _demand(path, key, activation, _ACTIVATIONS)
    fields |= {"activation": _ACTIVATIONS[activation]}
    fields["kv_heads"] = fields.get("kv_heads") or fields["heads"]
    fields["hidden"] = fields["hidden"] or 4 * fields["width"]
    if fields.get("head_dim") == fields["width"] / fields["heads"]:
        fields["head_dim"] = None  # the default, which width and heads already give
    return DecoderConfig(**fields, **_read_rope(values, chosen, path))


def write_config(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the content of a decoder's `config.json`, without its special tokens.

    Raises:
        UserError: the family's file can't describe the decoder.
    """
    chosen = _FORMATS[config.family]
    values: dict[str, Any] = {
        "architectures": [chosen.architecture],
        "model_type": config.family,
        "dtype": dtype,
        "use_cache": True,
    }
    values |= {key: getattr(config, name) for name, key in chosen.shape.items()}
    values |= {key: getattr(config, names[0]) for key, (names, _) in chosen.options.items()}
    if "head_dim" in values:
        values["head_dim"] = config.head_width
    values |= chosen.fixed
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    values[chosen.activation[0]] = names[config.activation]
    values |= _write_rope(config, chosen)
    _check_round_trip(config, values)
    if chosen.shape is _OPENAI_SHAPE:
        return values | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return values | {"attention_dropout": 0.0}


def _read_rope(values: Mapping[str, Any], chosen: _Format, path: Path) -> dict[str, Any]:
    """Return the rotary fields, from the keys of `transformers` 5 or of older files."""
    if values["model_type"] == "gptj":
        head = values["n_embd"] // values["n_head"]
        return {"rotary_fraction": (values.get("rotary_dim") or head) / head}
    if not chosen.has_rope:
        return {}
    rope: dict[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    _demand(path, "rope_type", kind, ("default", "llama3"))
    fields: dict[str, Any] = {
        "rope_theta": float(
            rope.get("rope_theta")
            or values.get("rope_theta")
            or values.get("rotary_emb_base", 10_000.0)
        )
    }
    if values["model_type"] == "gpt_neox":
        fraction = rope.get("partial_rotary_factor") or values.get("rotary_pct", 0.25)
        fields["rotary_fraction"] = float(fraction)
    if kind == "llama3":
        fields["rope_scaling"] = RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position_embeddings=rope["original_max_position_embeddings"],
        )
    return fields


def _write_rope(config: DecoderConfig, chosen: _Format) -> dict[str, Any]:
    if config.family == "gptj":
        return {"rotary_dim": config.rotary_width}
    if not chosen.has_rope:
        return {}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.family == "gpt_neox":
        rope["partial_rotary_factor"] = config.rotary_fraction
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **asdict(config.rope_scaling)}
    return {"rope_parameters": rope}


def _check_round_trip(config: DecoderConfig, values: dict[str, Any]) -> None:
    """Refuse a shape that the family's file can't express, instead of losing part of it."""
    again, ours = asdict(read_config(values, Path("config.json"))), asdict(config)
    for name, value in ours.items():
        if again[name] != value and not (name == "head_dim" and value == config.head_width):
            raise UserError(
                f"{name} = {value!r} can't be saved: models of family {config.family} have "
                f"{again[name]!r}"
            )


def _demand(path: Path, key: str, found: Any, wanted: Mapping[str, Any] | tuple[Any, ...]) -> None:
    if found not in wanted:
        names = " and ".join(map(repr, wanted))
        raise UserError(f"{path}: {key} = {found!r}; only {names} is supported")
