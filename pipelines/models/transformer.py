"""One decoder-only transformer: Llama, Mistral, Qwen, Phi, Gemma and GPTs by configuration.

Shape suffixes:
    B batch, S sequence, D model width, F width of the feed-forward layer, V vocabulary,
    R rotated features of a head, 2 cosine and sine

Papers: SwiGLU (Shazeer 2020), parallel residuals (Wang and Komatsuzaki 2021, GPT-J), norms of the
branches and layers of two kinds (Gemma Team 2025, Gemma 3).
"""

# ruff: noqa: N803, N806, N812 (names that end in their shape)

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelines.models.attention import (
    Attention,
    LatentAttention,
    Mask,
    attention_mask,
    narrower,
    positions,
    sequences,
)
from pipelines.models.config import DecoderConfig
from pipelines.models.experts import Experts, Router
from pipelines.models.loss import CrossEntropy, Objective, nats_by_position, next_token_loss
from pipelines.models.norms import build_norm
from pipelines.models.rotary import rotary_table
from pipelines.models.weights import canonical_name, draw

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def to_stream(x_BSD: Tensor) -> Tensor:
    """Return embeddings in the residual stream's type: autocast's, or else their own.

    `fully_shard` gathers weights in half precision, so that embeddings have this type already. With
    one rule for all layouts, all compute the same.
    """
    kind = x_BSD.device.type
    return x_BSD.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x_BSD


class FeedForward(nn.Module):
    """Two layers with an activation between them, which a third may gate (SwiGLU)."""

    def __init__(self, config: DecoderConfig, hidden: int) -> None:
        super().__init__()
        width, bias = config.width, config.mlp_bias
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

    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.input_layernorm = build_norm(config)
        self.self_attn = (LatentAttention if config.kv_lora_rank else Attention)(config)
        self.post_attention_layernorm = None if config.shared_norm else build_norm(config)
        is_first = number < config.first_k_dense_replace
        self.mlp = (
            Experts(config, _ACTIVATIONS[config.activation])
            if config.experts and not is_first
            else FeedForward(config, config.dense_hidden if is_first else config.hidden)
        )
        shared = 0 if is_first else config.n_shared_experts * config.hidden
        self.shared_experts = FeedForward(config, shared) if shared else None
        # What the branches add to the stream.
        self.attention_out_norm = build_norm(config) if config.branch_norms else nn.Identity()
        self.mlp_out_norm = build_norm(config) if config.branch_norms else nn.Identity()

    def forward(self, x_BSD: Tensor, rotary_2SR: Tensor | None, mask: Mask) -> Tensor:
        """Map [B, S, D] to [B, S, D]; the other arguments are those of `Attention`."""
        normed_BSD = self.input_layernorm(x_BSD)
        attended_BSD = self.attention_out_norm(self.self_attn(normed_BSD, rotary_2SR, mask))
        stream_BSD = x_BSD if self.parallel_residual else x_BSD + attended_BSD
        if self.post_attention_layernorm is not None:
            normed_BSD = self.post_attention_layernorm(stream_BSD)
        fed_BSD = self.mlp(normed_BSD)
        if self.shared_experts is not None:
            fed_BSD = fed_BSD + self.shared_experts(normed_BSD)
        out_BSD = stream_BSD + self.mlp_out_norm(fed_BSD)
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
        objective: Makes the loss of rows with documents, in place of the sum of their nats.
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
        self.layers = nn.ModuleDict({str(number): Block(config, number) for number in layers})
        self.norm = build_norm(config) if last else None
        self.lm_head = (
            nn.Linear(config.width, config.vocab_size, bias=config.head_bias) if last else None
        )
        self.cross_entropy: nn.Module = CrossEntropy()
        self.objective: Objective | None = None
        self.sequence_shards = 1
        self.context = (0, 1)
        self.most_documents: int | None = None
        self.rotary_2SR: Tensor | None
        self.local_rotary_2SR: Tensor | None  # of layers with a window, where they have their own
        local = config.local_rope_theta is not None
        for name, exists in (("rotary_2SR", not learned), ("local_rotary_2SR", local)):
            size = 2, config.context_length, config.rotary_width
            self.register_buffer(name, torch.empty(size) if exists else None, persistent=False)
        self.after_to_empty()

    def forward(
        self,
        inputs: Tensor,
        documents_BS: Tensor | None = None,
        targets_BS: Tensor | None = None,
        known_BK: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, S, V], or with targets the loss, for this part of each sequence.

        Args:
            inputs: Token ids [B, S], with S at most the context; or hidden states [B, S, D] if
                this part has no embeddings.
            documents_BS: The number of each token's document. A token sees only its own document,
                whose logits are the same as if it stood alone.
            targets_BS: The token after each, or `IGNORED`.
            known_BK: What an objective knows of each sample beforehand.

        Returns:
            Logits; with targets, their summed loss in nats, without ever holding all logits, or
            what the objective makes of their nats; from a part without a head, hidden states
            [B, S, D].
        """
        shards = self.sequence_shards if self.embed_tokens is None else 1
        length = inputs.shape[1] * shards
        mine = self._mine(length)
        x_BSD = inputs
        if self.embed_tokens is not None:
            x_BSD = to_stream(self.embed_tokens(inputs[:, mine]))
            if self.config.scaled_embeddings:
                # Rounded to the stream's type, as in transformers.
                x_BSD = x_BSD * x_BSD.new_full((), math.sqrt(self.config.width))
        if self.embed_positions is not None:
            numbers = positions(inputs, documents_BS)[:, mine]
            x_BSD = x_BSD + to_stream(self.embed_positions(numbers))
        windows = {each: narrower(self.config.window(int(each)), length) for each in self.layers}
        shape = len(inputs), length
        masks = {
            window: self._mask(documents_BS, shape, window, inputs.device)
            for window in dict.fromkeys(windows.values())
        }
        for number, layer in self.layers.items():
            x_BSD = layer(x_BSD, self._rotary(int(number)), masks[windows[number]])
        if self.norm is None or self.lm_head is None:
            return x_BSD
        x_BSD = self.norm(x_BSD)
        if targets_BS is None:
            return self.lm_head(x_BSD)  # type: ignore[no-any-return]
        targets_BP = targets_BS[:, mine]
        x_PD, targets_P = x_BSD.flatten(0, 1), targets_BP.flatten()
        how = self.lm_head, self.cross_entropy, x_PD, targets_P, self.config.vocab_size
        if self.objective is None or documents_BS is None:
            return next_token_loss(*how)
        nats_BP = nats_by_position(*how).view_as(targets_BP)
        return self.objective(nats_BP, targets_BP, documents_BS[:, mine], known_BK)

    def _mask(
        self,
        documents_BS: Tensor | None,
        shape: tuple[int, int],
        window: int | None,
        device: torch.device,
    ) -> Mask:
        if self.most_documents is None:
            needed = shape[1] if self.config.sinks else None
            return attention_mask(documents_BS, shape[1], window or needed, device)
        return sequences(documents_BS, shape, window, self.most_documents, device)

    def _rotary(self, layer: int) -> Tensor | None:
        has_own = self.local_rotary_2SR is not None and self.config.window(layer) is not None
        return self.local_rotary_2SR if has_own else self.rotary_2SR

    def _mine(self, length: int) -> slice:
        """Return the positions that this process works on."""
        rank, parts = self.context
        return slice(rank * length // parts, (rank + 1) * length // parts)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter from `seed` and its name, on any device and under any sharding."""
        self.after_to_empty()
        draw(self, self.config, seed)
        for bias in self.balance_biases.values():
            bias.zero_()

    @torch.no_grad()
    def after_to_empty(self) -> None:
        """Restore what `to_empty` loses besides weights: tied head, rotary positions, counts."""
        if (
            self.config.tie_embeddings
            and self.embed_tokens is not None
            and self.lm_head is not None
        ):
            self.lm_head.weight = self.embed_tokens.weight
        for router in self.routers.values():
            router.restart()
        for table_2SR, local in ((self.rotary_2SR, False), (self.local_rotary_2SR, True)):
            if table_2SR is not None and not table_2SR.is_meta:
                table_2SR.copy_(rotary_table(self.config, local=local))

    @property
    def routers(self) -> dict[str, Router]:
        """The routers by the numbers of their layers."""
        mlps = {number: layer.mlp for number, layer in self.layers.items()}
        return {number: mlp.router for number, mlp in mlps.items() if isinstance(mlp, Experts)}

    @property
    def balance_biases(self) -> dict[str, Tensor]:
        """The routers' biases by canonical name: no parameters, but saved with them."""
        buffers = {canonical_name(name): each for name, each in self.named_buffers()}
        return {name: each for name, each in buffers.items() if name.endswith("correction_bias")}

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
