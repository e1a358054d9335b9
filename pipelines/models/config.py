"""The shape of a decoder; it imports no torch, so the CLI and the DAG can load it quickly."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from pipelines.core.errors import UserError


@dataclass(frozen=True)
class RopeScaling:
    """Settings by which Llama 3.1 stretches rotary positions beyond its first training context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Yarn:
    """Settings by which YaRN stretches rotary positions (Peng et al. 2023).

    Attributes:
        factor: By how much what turns slowly is stretched.
        original_max_position_embeddings: The context that the model was first trained with.
        beta_fast: What turns at least so often within that context stays as it is.
        beta_slow: What turns at most so often is stretched in full.
        truncate: Whether the two bounds are whole numbers of a head's pairs of features.
        attention_factor: What rotated queries and keys are multiplied by; None: by `stretch`.
        mscale: In models such as DeepSeek-V3, how much `factor` counts for them,
        mscale_all_dim: and for the scores; what these are multiplied by, rotated features lack.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def stretch(self, share: float = 1.0) -> float:
        """Return what makes up for stretched positions (section 3.4)."""
        return 1 + 0.1 * share * math.log(max(self.factor, 1))


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of one decoder-only transformer; the defaults are Llama's.

    Small presets leave the vocabulary and context at 0; `sized` sets them from the tokenizer and
    `data.sequence_length`.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int  # width of the feed-forward layer, or of each expert
    vocab_size: int = 0
    context_length: int = 0
    family: str = "llama"  # Hugging Face's `model_type`; it decides the saved names and files
    head_dim: int | None = None  # width of one head, if it is not width / heads
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | Yarn | None = None
    rope_divisor: float = 1.0  # positions are divided by it: linear scaling
    local_rope_theta: float | None = None  # of layers with a window, if they have their own
    rotary_fraction: float = 1.0  # share of a head's features that are rotated
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    zero_centred_norms: bool = False  # RMSNorms multiply by 1 + weight
    branch_norms: bool = False  # what attention and feed-forward add is normalised too
    qk_norm: bool = False  # normalise queries and keys, each head by itself
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; else head_width's
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True  # the feed-forward layer has a gate, as in SwiGLU
    qkv_bias: bool = False
    output_bias: bool = False  # bias of attention's last projection
    mlp_bias: bool = False  # of a mixture, its router has one, too
    sinks: bool = False  # each head's softmax has a learned score more, which adds no value
    gate_limit: float | None = None  # experts clamp their gate, as in gpt-oss
    experts: int = 0  # of a layer; 0: the feed-forward layer is not a mixture
    experts_per_token: int = 0
    norm_topk_prob: bool = False  # the weights of a token's experts add up to 1
    sigmoid_router: bool = False  # experts are scored one by one, and biases keep them balanced
    n_group: int = 1  # a token's experts are of few groups of neighbours,
    topk_group: int = 1  # namely of so many
    routed_scaling_factor: float = 1.0  # a token's weights are multiplied by it
    n_shared_experts: int = 0  # every token goes through them, beside those chosen
    first_k_dense_replace: int = 0  # the first layers, which are no mixtures
    dense_hidden: int = 0  # width of their feed-forward layer
    kv_lora_rank: int | None = None  # all heads' keys and values come from so many numbers
    q_lora_rank: int | None = None  # so do queries, if not from the stream itself
    qk_nope_head_dim: int = 0  # with latents: a head's features that the position does not rotate,
    qk_rope_head_dim: int = 0  # that it rotates,
    v_head_dim: int = 0  # and of its values
    rope_interleave: bool = False  # neighbouring features are a pair
    head_bias: bool = False
    parallel_residual: bool = False  # attention and feed-forward read the same stream
    shared_norm: bool = False  # they also read it through the same norm
    sliding_window: int | None = None  # positions a token sees, including itself
    full_attention_every: int | None = None  # the last of so many layers has no window
    scaled_embeddings: bool = False  # embeddings are multiplied by sqrt(width)
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.head_dim is None and self.width % self.heads:
            raise UserError(f"width({self.width}) must be a multiple of heads({self.heads})")
        if self.rotary_width % 2:
            raise UserError(
                f"width({self.width}) must be heads({self.heads}) times an even number: "
                f"{self.rotary_width} features of a head can't be rotated in pairs"
            )
        if self.heads % self.kv_heads:
            raise UserError(f"heads({self.heads}) must be a multiple of kv_heads({self.kv_heads})")
        choice = self.experts // max(self.n_group, 1) * self.topk_group
        if self.experts and not 0 < self.experts_per_token <= choice:
            raise UserError(
                f"experts_per_token({self.experts_per_token}) must be from 1 to "
                f"experts({self.experts}) * topk_group({self.topk_group}) ÷ n_group({self.n_group})"
            )
        if self.v_head_dim > self.head_width:
            raise UserError(f"v_head_dim({self.v_head_dim}) must be at most {self.head_width}")
        if self.first_k_dense_replace >= self.layers:
            raise UserError(f"first_k_dense_replace must be below layers({self.layers})")
        if self.full_attention_every is not None and not self.sliding_window:
            raise UserError(
                f"full_attention_every({self.full_attention_every}): sliding_window is "
                f"{self.sliding_window}, but the other layers must have one"
            )

    @property
    def head_width(self) -> int:
        """Number of features of one attention head."""
        with_latents = self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or with_latents or self.width // self.heads

    @property
    def value_width(self) -> int:
        """Number of features of a head's values."""
        return self.v_head_dim or self.head_width

    @property
    def score_scale(self) -> float | None:
        """What scores are multiplied by; None: 1 over the root of the head's width."""
        scaling, scalar = self.rope_scaling, self.query_pre_attn_scalar or self.head_width
        if self.kv_lora_rank and isinstance(scaling, Yarn) and scaling.mscale_all_dim:
            scalar /= scaling.stretch(scaling.mscale_all_dim) ** 4
        return None if scalar == self.head_width else float(scalar**-0.5)

    @property
    def rotary_width(self) -> int:
        """Number of features of one attention head that the position rotates."""
        rotated = self.qk_rope_head_dim or int(self.head_width * self.rotary_fraction)
        return rotated if self.positions == "rotary" else 0

    @property
    def parameters(self) -> int:
        """Number of trainable parameters; tied ones count once."""
        embeddings = self.vocab_size * self.width * (1 if self.tie_embeddings else 2)
        if self.positions == "learned":
            embeddings += self.context_length * self.width
        head_bias = self.vocab_size * self.head_bias
        blocks = round(self.layers * self.layer_parameters)
        return embeddings + blocks + self._norm_parameters + head_bias

    @property
    def active_parameters(self) -> int:
        """Number of parameters that a token goes through: of a mixture, those of its experts."""
        idle = self.layer_parameters - self.active_layer_parameters
        return round(self.parameters - self.layers * idle)

    @property
    def active_layer_parameters(self) -> float:
        """Those of one layer that a token goes through, the mean of all layers."""
        idle = 1 - self.experts_per_token / max(self.experts, 1)
        return self.layer_parameters - idle * self.expert_parameters

    @property
    def hidden_per_token(self) -> float:
        """Features of feed-forward layers that a token goes through in one layer, the mean."""
        hidden = self.hidden * max(self.experts_per_token + self.n_shared_experts, 1)
        dense = self.first_k_dense_replace / self.layers
        return (1 - dense) * hidden + dense * self.dense_hidden

    @property
    def expert_parameters(self) -> float:
        """Those of all experts of one layer, the mean; 0 if none is a mixture."""
        rows, columns, number = self.matrices["up_proj"]
        one = 3 * rows * columns + (2 * rows + columns) * self.mlp_bias
        return number * one / self.layers if self.experts else 0.0

    @property
    def latents(self) -> int:
        """Numbers of a token from which all heads' keys and values, and queries, are computed."""
        return (self.kv_lora_rank or 0) + (self.q_lora_rank or 0)

    @property
    def attention_shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each matrix of a layer's attention by name."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        width, latent, rank = self.width, self.kv_lora_rank, self.q_lora_rank
        written = {"o_proj": (width, self.heads * self.value_width)}
        if latent is None:
            read = {"q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width)}
            return read | written
        inner = self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        by_name = {"q_a_proj": (rank, width)} if rank else {}
        by_name |= {"q_b_proj": (queries, rank or width), "kv_a_proj": (latent, width)}
        by_name |= {"k_rope_proj": (self.rotary_width, width), "kv_b_proj": (inner, latent)}
        return by_name | written

    @property
    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """Rows, columns and number, in all layers together, of each matrix of a block by name."""
        found = {name: (*shape, self.layers) for name, shape in self.attention_shapes.items()}
        first, width = self.first_k_dense_replace, self.width
        mixtures, shared = self.layers - first, self.n_shared_experts * self.hidden
        kinds = {"": (self.hidden, mixtures * max(self.experts, 1))}
        kinds |= {"shared_experts.": (shared, mixtures), "dense.": (self.dense_hidden, first)}
        for kind, (hidden, number) in kinds.items():
            if hidden * number:
                found[f"{kind}up_proj"] = read = (hidden, width, number)
                found[f"{kind}down_proj"] = (width, hidden, number)
                found |= {f"{kind}gate_proj": read} if self.gated else {}
        return found

    @property
    def layer_parameters(self) -> float:
        """The number of parameters of one layer, the mean of all layers."""
        attention = self.attention_shapes
        biases = (self.heads + 2 * self.kv_heads) * self.head_width * self.qkv_bias
        biases += self.width * self.output_bias + self.heads * self.sinks
        norms = (1 if self.shared_norm else 2) + (2 if self.branch_norms else 0)
        norms = norms * self._norm_parameters + 2 * self.head_width * self.qk_norm + self.latents
        routers = (self.layers - self.first_k_dense_replace) * self.experts
        summed = routers * (self.width + self.mlp_bias)  # over layers, which differ in these
        for name, (rows, columns, number) in self.matrices.items():
            summed += rows * (columns + self.mlp_bias * (name not in attention)) * number
        return summed / self.layers + biases + norms

    @property
    def _norm_parameters(self) -> int:
        return self.width * (1 if self.norm == "rms" else 2)

    def window(self, layer: int) -> int | None:
        """Return how many positions a token sees in a layer, including itself; None means all."""
        every = self.full_attention_every
        return None if every is not None and (layer + 1) % every == 0 else self.sliding_window

    def positions_seen(self, tokens: int) -> int:
        """Return how many positions the last of `tokens` tokens sees, summed over the layers."""
        return sum(min(tokens, self.window(each) or tokens) for each in range(self.layers))

    def sized(self, vocab_size: int, context_length: int) -> "DecoderConfig":
        """Return this shape with a tokenizer's vocabulary size and a context length in tokens."""
        return replace(self, vocab_size=vocab_size, context_length=context_length)
