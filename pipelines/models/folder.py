"""What a Hugging Face folder of a Llama says of itself.

No torch here: a folder that can't be trained on is refused before anything starts.
"""

from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.storage import read_json
from pipelines.models.config import DecoderConfig

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


def load_config(folder: Path) -> DecoderConfig:
    """The shape of the model in a Hugging Face folder.

    Raises:
        UserError: no such folder, a broken `config.json`, or a model that this decoder is not.
    """
    path = folder / _CONFIG
    values = _read(path)
    _demand(path, "model_type", values.get("model_type"), "llama")
    for key in _NUMBERS:
        if not isinstance(values.get(key), int | float) or values[key] <= 0:
            raise UserError(f"{path}: {key} = {values.get(key)!r}; it must be a number above 0")
    rope: dict[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    heads, width = values["num_attention_heads"], values["hidden_size"]
    _demand(path, "hidden_act", values.get("hidden_act", "silu"), "silu")
    _demand(path, "attention_bias", values.get("attention_bias", False), False)
    _demand(path, "mlp_bias", values.get("mlp_bias", False), False)
    _demand(path, "rope_type", rope.get("rope_type", "default"), "default")
    _demand(path, "head_dim", values.get("head_dim") or width // heads, width // heads)
    return DecoderConfig(
        layers=values["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        hidden=values["intermediate_size"],
        vocab_size=values["vocab_size"],
        context_length=values["max_position_embeddings"],
        rope_theta=rope.get("rope_theta") or values.get("rope_theta", 10_000.0),
        norm_eps=values["rms_norm_eps"],
        tie_embeddings=values.get("tie_word_embeddings", False),
    )


def _demand(path: Path, key: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise UserError(f"{path}: {key} = {found!r}; only {wanted!r} is supported")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path.parent}: no {path.name}; give a folder in Hugging Face's format")
    try:
        values = read_json(path)
    except ValueError as error:  # of JSON or of UTF-8
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object; give a folder in Hugging Face's format")
    return values


def to_llama(config: DecoderConfig) -> dict[str, Any]:
    """What `config.json` says of a decoder, besides its special tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder.

    Raises:
        UserError: there are none, or one that the index names is missing.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / _INDEX).is_file():
        return _indexed(folder / _INDEX)
    pickles = [p.name for suffix in ("bin", "pt", "pth") for p in folder.glob(f"*.{suffix}")]
    if pickles:
        raise UserError(f"{folder}: {pickles[0]} is a pickle, which can run code; want {WEIGHTS}")
    raise UserError(f"{folder}: no {WEIGHTS}")


def _indexed(index: Path) -> list[Path]:
    weight_map = _read(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: no 'weight_map' in it; the file is broken")
    paths = [index.parent / name for name in sorted(set(weight_map.values()))]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: missing, but {index.name} names it")
    return paths
