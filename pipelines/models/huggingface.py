"""A decoder as a Hugging Face folder: safetensors and JSON, never a pickle.

`transformers` is not needed here; its `AutoModelForCausalLM` loads what `save_pretrained` writes.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.core.storage import read_json, write_json
from pipelines.models.presets import DecoderConfig
from pipelines.models.transformer import Transformer

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_PREFIX = "model."  # of every tensor but the head's


def save_pretrained(model: Transformer, folder: Path, end_of_text: int | None = None) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads.

    Args:
        model: On any device; the weights are written as they are, a tied head once.
        folder: Made where missing.
        end_of_text: The token id that ends a document, and so a generation.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name if name == _HEAD else _PREFIX + name: tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == _HEAD and model.config.tie_embeddings)
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    special = {} if end_of_text is None else dict.fromkeys(_SPECIAL_TOKENS, end_of_text)
    write_json(folder / "config.json", _to_llama(model.config) | special)
    write_json(folder / "generation_config.json", special)


def load_pretrained(folder: Path) -> Transformer:
    """Read a Llama folder, ours or another's, into fp32 weights on the CPU.

    Raises:
        UserError: not a folder with safetensors weights of a Llama, or a tensor is missing.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    model = Transformer(load_config(folder))
    try:
        files = _weight_files(folder)
        tensors = {name: t for file in files for name, t in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder}: the weights can't be read: {error}") from error
    weights = {name.removeprefix(_PREFIX): tensor.float() for name, tensor in tensors.items()}
    if model.config.tie_embeddings and "embed_tokens.weight" in weights:
        weights[_HEAD] = weights["embed_tokens.weight"]
    _check_shapes(folder, model, weights)
    model.load_state_dict(weights)
    return model


def load_config(folder: Path) -> DecoderConfig:
    """The shape of the model in a Hugging Face folder.

    Raises:
        UserError: no such folder, or a model that this decoder is not.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no config.json; give a folder in Hugging Face's format")
    values: dict[str, Any] = read_json(path)
    rope: dict[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    heads = values.get("num_attention_heads", 0)
    demands = {
        "model_type": (values.get("model_type"), "llama"),
        "hidden_act": (values.get("hidden_act", "silu"), "silu"),
        "attention_bias": (values.get("attention_bias", False), False),
        "mlp_bias": (values.get("mlp_bias", False), False),
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "head_dim": (
            values.get("head_dim") or values["hidden_size"] // heads,
            values["hidden_size"] // heads,
        ),
    }
    for key, (found, wanted) in demands.items():
        if found != wanted:
            raise UserError(f"{path}: {key} = {found!r}; only {wanted!r} is supported")
    return DecoderConfig(
        layers=values["num_hidden_layers"],
        width=values["hidden_size"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        hidden=values["intermediate_size"],
        vocab_size=values["vocab_size"],
        context_length=values["max_position_embeddings"],
        rope_theta=rope.get("rope_theta") or values.get("rope_theta", 10_000.0),
        norm_eps=values["rms_norm_eps"],
        tie_embeddings=values.get("tie_word_embeddings", False),
    )


_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _to_llama(config: DecoderConfig) -> dict[str, Any]:
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


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / _INDEX).is_file():
        names = set(read_json(folder / _INDEX)["weight_map"].values())
        return [folder / name for name in sorted(names)]
    pickles = [p.name for suffix in ("bin", "pt", "pth") for p in folder.glob(f"*.{suffix}")]
    if pickles:
        raise UserError(f"{folder}: {pickles[0]} is a pickle, which can run code; want {WEIGHTS}")
    raise UserError(f"{folder}: no {WEIGHTS}")


def _check_shapes(folder: Path, model: Transformer, weights: dict[str, Tensor]) -> None:
    wanted = model.state_dict()
    for name in wanted.keys() - weights.keys():
        raise UserError(f"{folder}: the tensor {name} is missing from the weights")
    for name in weights.keys() - wanted.keys():
        raise UserError(f"{folder}: the tensor {name} is not one of this model")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            found, want = tuple(tensor.shape), tuple(wanted[name].shape)
            raise UserError(f"{folder}: {name} has shape {found}, config.json says {want}")
