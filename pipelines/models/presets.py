"""Shapes of decoders by name; no torch here, so that the command and the DAG can read them."""

import difflib
from dataclasses import dataclass, replace

from pipelines.core.errors import UserError


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a Llama-style decoder.

    Vocabulary and context are unknown to a preset: the tokenizer and `data.sequence_length` give
    them through `sized`.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int  # width of the SwiGLU layer
    vocab_size: int = 0
    context_length: int = 0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads or self.head_width % 2:
            raise UserError(f"width({self.width}) must be heads({self.heads}) times an even number")
        if self.heads % self.kv_heads:
            raise UserError(f"heads({self.heads}) must be a multiple of kv_heads({self.kv_heads})")

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """How many numbers training adjusts."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_width
        block = attention + 3 * self.width * self.hidden + 2 * self.width
        embeddings = self.vocab_size * self.width * (1 if self.tie_embeddings else 2)
        return embeddings + self.layers * block + self.width

    def sized(self, vocab_size: int, context_length: int) -> "DecoderConfig":
        """This shape for a tokenizer's vocabulary and a context in tokens."""
        return replace(self, vocab_size=vocab_size, context_length=context_length)


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
