"""Shapes of decoders by name; no torch here, so that the command and the DAG can read them."""

import difflib

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig

# The name is the rough number of parameters with the vocabulary that suits the size.
PRESETS: dict[str, DecoderConfig] = {
    "llama-100k": DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, hidden=176),
    "llama-1m": DecoderConfig(layers=4, width=128, heads=4, kv_heads=2, hidden=384),
    "llama-3m": DecoderConfig(layers=6, width=192, heads=6, kv_heads=2, hidden=512),
    "llama-10m": DecoderConfig(layers=6, width=320, heads=10, kv_heads=5, hidden=896),
}


def preset(name: str) -> DecoderConfig:
    """The shape of that name; raises UserError with the nearest one."""
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(PRESETS)}"
    raise UserError(f"model.preset = {name!r}: no such preset; {hint}")
