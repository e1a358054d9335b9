"""Reads and writes `config.json`, by the family of the model; no torch here."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig, RopeScaling, Yarn
from pipelines.models.families import ACTIVATIONS, OPENAI_SHAPE, Family, find_family

_FULL, _LOCAL = "full_attention", "sliding_attention"  # kinds of layers
_ROPE_THETA = ((), 10_000.0)
_KINDS = get_type_hints(DecoderConfig)
_MOST = {"layers": 1000, "context_length": 1 << 24}  # any other number: 1 << 20
_LEAST = 1e-6  # of what something is divided by
_SCALINGS: dict[str, Any] = {"llama3": RopeScaling, "yarn": Yarn}


def read_config(values: Mapping[str, Any], path: Path) -> DecoderConfig:
    """Return the decoder that a `config.json` describes.

    Raises:
        UserError: the family is unknown, or a key has a value that this decoder doesn't support.
    """
    family = values.get("model_type")
    try:
        chosen = find_family(family)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    method = _object(values, "quantization_config", path).get("quant_method")
    if method in ("mxfp4", "fp8"):
        raise UserError(f"{path}: {method.upper()} weights; give them in bf16: docs/training.md")
    values = {chosen.renamed.get(key, key): value for key, value in values.items()}
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
    _demand(path, key, activation, ACTIVATIONS)
    fields |= {"activation": ACTIVATIONS[activation]}
    fields["kv_heads"] = fields.get("kv_heads") or fields["heads"]
    fields["hidden"] = fields["hidden"] or 4 * fields["width"]
    if fields.get("head_dim") == fields["width"] / fields["heads"]:
        fields["head_dim"] = None  # the default, which width and heads already give
    fields |= _read_rope(values, chosen, path)
    if "full_attention_every" in fields:
        fields |= _read_layer_types(values, fields, path)
    _check_numbers(fields, path)
    try:
        config = DecoderConfig(**fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return config


def _object(values: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    found = values.get(key) or {}
    if not isinstance(found, dict):
        raise UserError(f"{path}: {key} = {found!r}; it must be an object")
    return found


def _check_numbers(fields: dict[str, Any], path: Path) -> None:
    for name, value in fields.items():
        kinds = get_args(_KINDS[name]) or (_KINDS[name],)
        if not {int, float}.isdisjoint(kinds) and (value is not None or type(None) not in kinds):
            most = _MOST.get(name, 1 << 20) if int in kinds else math.inf
            is_number = isinstance(value, int | float) and 0 <= value <= most
            if not is_number or value == math.inf or (int in kinds and value != int(value)):
                what = f"whole number from 0 to {most}" if int in kinds else "number from 0"
                raise UserError(f"{path}: {name} = {value!r}; it must be a {what}")
            fields[name] = int(value) if int in kinds else value
        elif bool in kinds and not isinstance(value, bool | None):
            raise UserError(f"{path}: {name} = {value!r}; it must be true or false")


def _number(path: Path, key: str, value: Any, least: float = 0.0) -> float:
    if not isinstance(value, int | float) or not least <= value < math.inf:
        raise UserError(f"{path}: {key} = {value!r}; it must be a number from {least:g}")
    return float(value)


def write_config(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the content of a decoder's `config.json`, without its special tokens.

    Raises:
        UserError: the family's file can't describe the decoder.
    """
    chosen = find_family(config.family)
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
    values |= {"num_nextn_predict_layers": 0} if config.sigmoid_router else {}
    key, default = chosen.activation
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    names[ACTIVATIONS[default]] = default
    values[key] = names[config.activation]
    values |= _write_rope(config, chosen)
    _check_round_trip(config, values)
    if chosen.shape is OPENAI_SHAPE:
        return values | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return values | {"attention_dropout": 0.0}


def _read_rope(values: Mapping[str, Any], chosen: Family, path: Path) -> dict[str, Any]:
    """Return the rotary fields, from the keys of `transformers` 5 or of older files."""
    if values["model_type"] == "gptj":
        head = max(1, int(values["n_embd"] // values["n_head"]))
        rotated = _number(path, "rotary_dim", values.get("rotary_dim") or head)
        return {"rotary_fraction": rotated / head}
    if not chosen.has_rope:
        return {}
    rope = _object(values, "rope_parameters", path) or _object(values, "rope_scaling", path)
    rope = _object(rope, _FULL, path) or rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    _demand(path, "rope_type", kind, chosen.rope_types)
    stated = rope.get("rope_theta") or values.get("rope_theta") or values.get("rotary_emb_base")
    theta = stated or chosen.options.get("rope_theta", _ROPE_THETA)[1]
    fields: dict[str, Any] = {"rope_theta": _number(path, "rope_theta", theta, 1.001)}
    if chosen.rotary_fraction is not None:
        older, default = chosen.rotary_fraction
        fraction = rope.get("partial_rotary_factor") or values.get(older, default)
        fields["rotary_fraction"] = min(1.0, _number(path, older, fraction))
    if kind == "linear":
        fields["rope_divisor"] = _number(path, "factor", rope.get("factor"), _LEAST)
    if scaling := _SCALINGS.get(kind):
        for key in ("factor", "original_max_position_embeddings"):
            if not isinstance(rope.get(key), int | float):
                raise UserError(f"{path}: {key} of rope_type {kind!r} must be a number")
        given = {name: rope[name] for name in scaling.__match_args__ if rope.get(name) is not None}
        for name, value in given.items():
            _number(path, name, value, 0 if name == "truncate" else _LEAST)
        fields["rope_scaling"] = scaling(**given)
    return fields


def _read_layer_types(values: dict[str, Any], fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return what `transformers` 5 says of layers with a window and without; older files need not.

    Args:
        values: The content of the file.
        fields: What its other keys say, and what they leave to the family.
        path: The file.
    """
    every, layers = fields.get("full_attention_every"), values["num_hidden_layers"]
    kinds = values.get("layer_types") or _layer_types(every, layers)
    if not isinstance(kinds, list):
        raise UserError(f"{path}: layer_types = {kinds!r}; it must be a list")
    if _FULL in kinds:
        every = kinds.index(_FULL) + 1
    elif not every or _number(path, "sliding_window_pattern", every) <= layers:
        every = layers + 1  # any other number that no layer reaches says the same
    if kinds != _layer_types(every, layers):
        raise UserError(
            f"{path}: layer_types: only {_FULL} after equally many {_LOCAL} is supported"
        )
    rope = _object(_object(values, "rope_parameters", path), _LOCAL, path)
    _demand(path, f"rope_type of {_LOCAL}", rope.get("rope_type", "default"), ("default",))
    theta = rope.get("rope_theta") or fields.get("local_rope_theta")
    return {"full_attention_every": every, "local_rope_theta": theta}


def _layer_types(every: int | None, layers: int) -> list[str]:
    numbers = range(1, layers + 1)
    return [_LOCAL if not every or number % every else _FULL for number in numbers]


def _write_rope(config: DecoderConfig, chosen: Family) -> dict[str, Any]:
    if config.family == "gptj":
        return {"rotary_dim": config.rotary_width}
    if not chosen.has_rope:
        return {}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if chosen.rotary_fraction is not None:
        rope["partial_rotary_factor"] = config.rotary_fraction
    if config.rope_scaling is not None:
        given = {key: each for key, each in asdict(config.rope_scaling).items() if each is not None}
        rope |= {"rope_type": chosen.rope_types[-1], **given}
    if config.rope_divisor != 1:
        rope |= {"rope_type": "linear", "factor": config.rope_divisor}
    if config.local_rope_theta is not None:
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
        rope = {_FULL: rope, _LOCAL: local}
    values: dict[str, Any] = {"rope_parameters": rope}
    if config.full_attention_every is not None:
        values["layer_types"] = _layer_types(config.full_attention_every, config.layers)
    if config.family == "phi3":
        # Where generation goes beyond it, transformers computes all keys and values again.
        values["original_max_position_embeddings"] = config.context_length
    return values


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
    if all(found != each for each in wanted):  # a list or an object has no hash
        names = " and ".join(map(repr, wanted))
        raise UserError(f"{path}: {key} = {found!r}; only {names} is supported")
