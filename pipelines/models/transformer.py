"""One decoder-only transformer: Llama, Mistral, Qwen, GPT-2, GPT-NeoX and GPT-J by configuration.

Shape suffixes:
    B batch, S sequence, D model width, F width of the feed-forward layer, V vocabulary,
    R features of a head that are turned, 2 cosine and sine

Papers: RMSNorm (Zhang and Sennrich 2019), LayerNorm (Ba et al. 2016), SwiGLU (Shazeer 2020),
parallel residuals (Wang and Komatsuzaki 2021, GPT-J).
"""

# ruff: noqa: N803, N806, N812 (names that end in their shape)

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelines.models.attention import Attention, Mask, attention_mask, positions, rotary_table
from pipelines.models.config import DecoderConfig
from pipelines.models.loss import CrossEntropy, next_token_loss
from pipelines.models.weights import draw

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def build_norm(config: DecoderConfig) -> nn.Module:
    """Build a norm of the residual stream."""
    norm = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return norm(config.width, eps=config.norm_eps)


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
        """[B, S, D] to [B, S, D]."""
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
        self.mlp = FeedForward(config)

    def forward(self, x_BSD: Tensor, rotary_2SR: Tensor | None, mask: Mask) -> Tensor:
        """[B, S, D] to [B, S, D]; the rest as of `Attention`."""
        normed_BSD = self.input_layernorm(x_BSD)
        attended_BSD = self.self_attn(normed_BSD, rotary_2SR, mask)
        stream_BSD = x_BSD if self.parallel_residual else x_BSD + attended_BSD
        if self.post_attention_layernorm is not None:
            normed_BSD = self.post_attention_layernorm(stream_BSD)
        out_BSD = stream_BSD + self.mlp(normed_BSD)
        return out_BSD + attended_BSD if self.parallel_residual else out_BSD  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A decoder, or consecutive layers of one as a stage of a pipeline.

    Parameters bear the names of Hugging Face's Llama, whatever the family and the part.

    Attributes:
        embed_tokens: None where the part lacks layer 0.
        embed_positions: None there too, and where positions are rotary.
        layers: By their numbers in the whole decoder, "0" the first.
        norm: The last one; None where the part lacks the last layer.
        lm_head: None there too. Its weight is that of `embed_tokens` where they are tied and both
            here; a pipeline's last stage has a copy, whose gradient its owner must add.
        cross_entropy: Of logits [P, V] and targets [P]; may be compiled, or replaced.
        sequence_shards: Over how many processes hidden states lie, along the sequence.
        context: Which part of each sequence it works on, and of how many: context parallel.
    """

    def __init__(self, config: DecoderConfig, layers: range | None = None) -> None:
        """Make the modules; `init_weights` or `huggingface.load_weights` give them values.

        Args:
            config: Of the whole decoder.
            layers: Which of its layers this part has, all by default. The embeddings belong to
                layer 0, norm and head to the last one; `range(0, 0)` has the embeddings only.
        """
        super().__init__()
        self.config = config
        layers = range(config.layers) if layers is None else layers
        first, last = layers.start == 0, layers.stop == config.layers
        learned = config.positions == "learned"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width) if first else None
        self.embed_positions = (
            nn.Embedding(config.context_length, config.width) if first and learned else None
        )
        self.layers = nn.ModuleDict({str(number): Block(config) for number in layers})
        self.norm = build_norm(config) if last else None
        self.lm_head = (
            nn.Linear(config.width, config.vocab_size, bias=config.head_bias) if last else None
        )
        self.cross_entropy: nn.Module = CrossEntropy()
        self.sequence_shards = 1
        self.context = (0, 1)
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
        """Logits [B, S, V], or the loss where there are targets; of its part of each sequence.

        Args:
            inputs: Token ids [B, S], S at most the context; hidden states [B, S, D] where this
                part has no embeddings.
            documents_BS: The number of each token's document: a token sees its own one only, and
                the document's logits are what they are where it stands alone.
            targets_BS: The token after each, or `IGNORED`.

        Returns:
            Logits; with targets, the sum of their nats, without ever holding all logits; from a
            part without head, hidden states [B, S, D].
        """
        shards = self.sequence_shards if self.embed_tokens is None else 1
        length, window = inputs.shape[1] * shards, self.config.sliding_window
        mine = self._mine(length)
        x_BSD = inputs if self.embed_tokens is None else self.embed_tokens(inputs[:, mine])
        if self.embed_positions is not None:
            x_BSD = x_BSD + self.embed_positions(positions(inputs, documents_BS)[:, mine])
        mask = attention_mask(documents_BS, length, window, inputs.device)
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
        """The positions that this process works on."""
        rank, parts = self.context
        return slice(rank * length // parts, (rank + 1) * length // parts)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter from `seed` and its name, on any device and under any sharding."""
        self.after_to_empty()
        draw(self, self.config, seed)

    @torch.no_grad()
    def after_to_empty(self) -> None:
        """Bring back what `to_empty` loses besides the weights: the tie, and rotary positions."""
        if (
            self.config.tie_embeddings
            and self.embed_tokens is not None
            and self.lm_head is not None
        ):
            self.lm_head.weight = self.embed_tokens.weight
        if self.rotary_2SR is not None and not self.rotary_2SR.is_meta:
            self.rotary_2SR.copy_(rotary_table(self.config))

    @property
    def tied_copy(self) -> Tensor | None:
        """The head's weight where it is a copy: the embeddings it is tied to are another part's."""
        if self.lm_head is None or self.embed_tokens is not None or not self.config.tie_embeddings:
            return None
        return self.lm_head.weight

    @property
    def parameter_count(self) -> int:
        """Trainable numbers, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
