"""One decoder-only transformer: Llama, Mistral, Qwen, GPT-2, GPT-NeoX and GPT-J by configuration.

Shape suffixes:
    B batch, S sequence, D model width, F width of the feed-forward layer, V vocabulary,
    R rotated features of a head, 2 cosine and sine

Papers: RMSNorm (Zhang and Sennrich 2019), LayerNorm (Ba et al. 2016), SwiGLU (Shazeer 2020),
parallel residuals (Wang and Komatsuzaki 2021, GPT-J).
"""

# ruff: noqa: N803, N806, N812 (names that end in their shape)

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelines.models.attention import (
    Attention,
    Mask,
    attention_mask,
    positions,
    rotary_table,
    sequences,
)
from pipelines.models.config import DecoderConfig
from pipelines.models.experts import Experts
from pipelines.models.loss import CrossEntropy, next_token_loss
from pipelines.models.weights import draw

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose result has its input's type, also under autocast; it is computed in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm whose result has its input's type, also under autocast; it is computed in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def build_norm(config: DecoderConfig) -> nn.Module:
    """Build a norm of the residual stream."""
    norm = RMSNorm if config.norm == "rms" else LayerNorm
    return norm(config.width, eps=config.norm_eps)


def to_stream(x_BSD: Tensor) -> Tensor:
    """Return embeddings in the residual stream's type: autocast's, or else their own.

    `fully_shard` gathers weights in half precision, so that embeddings have this type already. With
    one rule for all layouts, all compute the same.
    """
    kind = x_BSD.device.type
    return x_BSD.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x_BSD


class FeedForward(nn.Module):
    """Two layers with an activation between them, which a third may gate (SwiGLU)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, hidden, bias = config.width, config.hidden, config.mlp_bias
        self.gate_proj = nn.Linear(width, hidden, bias=bias) if config.gated else None
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        if self.gate_proj is None:
            h_BSF = self.activation(self.up_proj(x_BSD))
        else:
            h_BSF = self.activation(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        return self.down_proj(h_BSF)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.input_layernorm = build_norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = None if config.shared_norm else build_norm(config)
        self.mlp = (
            Experts(config, _ACTIVATIONS[config.activation])
            if config.experts
            else FeedForward(config)
        )

    def forward(self, x_BSD: Tensor, rotary_2SR: Tensor | None, mask: Mask) -> Tensor:
        """Map [B, S, D] to [B, S, D]; the other arguments are those of `Attention`."""
        normed_BSD = self.input_layernorm(x_BSD)
        attended_BSD = self.self_attn(normed_BSD, rotary_2SR, mask)
        stream_BSD = x_BSD if self.parallel_residual else x_BSD + attended_BSD
        if self.post_attention_layernorm is not None:
            normed_BSD = self.post_attention_layernorm(stream_BSD)
        out_BSD = stream_BSD + self.mlp(normed_BSD)
        return out_BSD + attended_BSD if self.parallel_residual else out_BSD  # type: ignore[no-any-return]


class Embedding(nn.Embedding):
    """nn.Embedding that fills no weights without memory: torch would import its compiler for it."""

    def reset_parameters(self) -> None:
        """Fill the weights as torch does, but on the meta device."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Transformer(nn.Module):
    """A decoder, or consecutive layers of one as a stage of a pipeline.

    Parameters have the names of Hugging Face's Llama in every family and every part.

    Attributes:
        embed_tokens: None if the part lacks layer 0.
        embed_positions: None in the same case, and if positions are rotary.
        layers: The blocks by their numbers in the whole decoder; "0" is the first.
        norm: The last norm; None if the part lacks the last layer.
        lm_head: None in the same case. If tied, it shares the weight of `embed_tokens` where both
            are here; a pipeline's last stage has a copy, and the two gradients must be added.
        cross_entropy: Maps logits [P, V] and targets [P] to a loss; may be compiled or replaced.
        sequence_shards: The number of processes that hidden states are split over by position.
        context: The index of this process's part of each sequence, and the number of parts, in
            context parallelism.
        most_documents: The most documents in a row of the data, if `varlen_attn` attends within
            documents and windows; None if that is left to masks.
    """

    def __init__(self, config: DecoderConfig, layers: range | None = None) -> None:
        """Make the modules; `init_weights` or `pretrained.load_weights` fill them.

        Args:
            config: The config of the whole decoder.
            layers: The layers of this part; all by default. The embeddings belong to layer 0, the
                norm and head to the last layer; `range(0, 0)` has only the embeddings.
        """
        super().__init__()
        self.config = config
        layers = range(config.layers) if layers is None else layers
        first, last = layers.start == 0, layers.stop == config.layers
        learned = config.positions == "learned"
        self.embed_tokens = Embedding(config.vocab_size, config.width) if first else None
        self.embed_positions = (
            Embedding(config.context_length, config.width) if first and learned else None
        )
        self.layers = nn.ModuleDict({str(number): Block(config) for number in layers})
        self.norm = build_norm(config) if last else None
        self.lm_head = (
            nn.Linear(config.width, config.vocab_size, bias=config.head_bias) if last else None
        )
        self.cross_entropy: nn.Module = CrossEntropy()
        self.sequence_shards = 1
        self.context = (0, 1)
        self.most_documents: int | None = None
        table = None if learned else torch.empty(2, config.context_length, config.rotary_width)
        self.register_buffer("rotary_2SR", table, persistent=False)
        self.rotary_2SR: Tensor | None
        self.after_to_empty()

    def forward(
        self,
        inputs: Tensor,
        documents_BS: Tensor | None = None,
        targets_BS: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, S, V], or with targets the loss, for this part of each sequence.

        Args:
            inputs: Token ids [B, S], with S at most the context; or hidden states [B, S, D] if
                this part has no embeddings.
            documents_BS: The number of each token's document. A token sees only its own document,
                whose logits are the same as if it stood alone.
            targets_BS: The token after each, or `IGNORED`.

        Returns:
            Logits; with targets, their summed loss in nats, without ever holding all logits; from
            a part without a head, hidden states [B, S, D].
        """
        shards = self.sequence_shards if self.embed_tokens is None else 1
        length, window = inputs.shape[1] * shards, self.config.sliding_window
        mine = self._mine(length)
        x_BSD = inputs
        if self.embed_tokens is not None:
            x_BSD = to_stream(self.embed_tokens(inputs[:, mine]))
        if self.embed_positions is not None:
            numbers = positions(inputs, documents_BS)[:, mine]
            x_BSD = x_BSD + to_stream(self.embed_positions(numbers))
        if self.most_documents is None:
            mask = attention_mask(documents_BS, length, window, inputs.device)
        else:
            shape, most = (len(inputs), length), self.most_documents
            mask = sequences(documents_BS, shape, window, most, inputs.device)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, self.rotary_2SR, mask)
        if self.norm is None or self.lm_head is None:
            return x_BSD
        x_BSD = self.norm(x_BSD)
        if targets_BS is None:
            return self.lm_head(x_BSD)  # type: ignore[no-any-return]
        x_PD, targets_P = x_BSD.flatten(0, 1), targets_BS[:, mine].flatten()
        vocabulary = self.config.vocab_size
        return next_token_loss(self.lm_head, self.cross_entropy, x_PD, targets_P, vocabulary)

    def _mine(self, length: int) -> slice:
        """Return the positions that this process works on."""
        rank, parts = self.context
        return slice(rank * length // parts, (rank + 1) * length // parts)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter from `seed` and its name, on any device and under any sharding."""
        self.after_to_empty()
        draw(self, self.config, seed)

    @torch.no_grad()
    def after_to_empty(self) -> None:
        """Restore what `to_empty` loses besides weights: tied head, rotary positions, counts."""
        if (
            self.config.tie_embeddings
            and self.embed_tokens is not None
            and self.lm_head is not None
        ):
            self.lm_head.weight = self.embed_tokens.weight
        if self.rotary_2SR is not None and not self.rotary_2SR.is_meta:
            self.rotary_2SR.copy_(rotary_table(self.config))
        for layer in self.layers.values():
            if isinstance(layer.mlp, Experts):
                layer.mlp.router.restart()

    @property
    def tied_copy(self) -> Tensor | None:
        """The head's weight if it is tied to embeddings that another part holds, or None."""
        if self.lm_head is None or self.embed_tokens is not None or not self.config.tie_embeddings:
            return None
        return self.lm_head.weight

    @property
    def parameter_count(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())
