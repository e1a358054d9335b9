"""The shape of a decoder; no torch here, so that the command and the DAG can read it."""

from dataclasses import dataclass, replace
from typing import Literal

from pipelines.core.errors import UserError

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "gptj"]


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches its rotary positions beyond the context it was first trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of one decoder-only transformer; the defaults are Llama's.

    Small presets leave vocabulary and context open: the tokenizer and `data.sequence_length` give
    them through `sized`.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int  # width of the feed-forward layer
    vocab_size: int = 0
    context_length: int = 0
    family: Family = "llama"  # Hugging Face's `model_type`, whose names and files it is saved under
    head_dim: int | None = None  # of one head, where it is not width / heads
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0  # of a head's features that are turned
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    qk_norm: bool = False  # queries and keys are normalised, a head at a time
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True  # the feed-forward layer has a gate, as in SwiGLU
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's last projection
    mlp_bias: bool = False
    head_bias: bool = False
    parallel_residual: bool = False  # attention and feed-forward read the same stream
    shared_norm: bool = False  # and the same norm of it
    sliding_window: int | None = None  # a token sees so many, itself included
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.head_dim is None and self.width % self.heads:
            raise UserError(f"width({self.width}) must be a multiple of heads({self.heads})")
        if self.rotary_width % 2:
            raise UserError(
                f"width({self.width}) must be heads({self.heads}) times an even number: "
                f"{self.rotary_width} features of a head can't be turned in pairs"
            )
        if self.heads % self.kv_heads:
            raise UserError(f"heads({self.heads}) must be a multiple of kv_heads({self.kv_heads})")

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.head_dim or self.width // self.heads

    @property
    def rotary_width(self) -> int:
        """Features of one attention head that are turned by its position."""
        return int(self.head_width * self.rotary_fraction) if self.positions == "rotary" else 0

    @property
    def parameters(self) -> int:
        """How many numbers training adjusts, tied ones counted once."""
        embeddings = self.vocab_size * self.width * (1 if self.tie_embeddings else 2)
        if self.positions == "learned":
            embeddings += self.context_length * self.width
        head_bias = self.vocab_size * self.head_bias
        return embeddings + self.layers * self.layer_parameters + self._norm_parameters + head_bias

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of one layer."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        attention = 2 * self.width * (queries + keys) + 2 * self.head_width * self.qk_norm
        attention += (queries + 2 * keys) * self.qkv_bias + self.width * self.output_bias
        inner = (2 if self.gated else 1) * self.hidden
        feed_forward = (inner + self.hidden) * self.width + (inner + self.width) * self.mlp_bias
        norms = (1 if self.shared_norm else 2) * self._norm_parameters
        return attention + feed_forward + norms

    @property
    def _norm_parameters(self) -> int:
        return self.width * (1 if self.norm == "rms" else 2)

    def sized(self, vocab_size: int, context_length: int) -> "DecoderConfig":
        """This shape for a tokenizer's vocabulary and a context in tokens."""
        return replace(self, vocab_size=vocab_size, context_length=context_length)
