"""One decoder-only transformer in the manner of Llama.

Shape suffixes:
    B batch, S sequence, D model width, N heads, K key-value heads, H head width,
    F width of the feed-forward layer, V vocabulary, 1 for every head

Papers: RMSNorm (Zhang and Sennrich 2019), SwiGLU (Shazeer 2020), rotary positions (Su et al.
2021), grouped-query attention (Ainslie et al. 2023).
"""

# ruff: noqa: N803, N806, N812 (names that end in their shape)

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelines.models.presets import DecoderConfig


def rotary_angles(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's rotation, both [context, H] in fp32."""
    half = torch.arange(0, config.head_width, 2, dtype=torch.float32) / config.head_width
    frequencies = 1.0 / (config.rope_theta**half)
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Turn features i and i + H/2 by the position's angle: the layout of Hugging Face's Llama."""
    left, right = x_BNSH.chunk(2, dim=-1)
    turned_BNSH = torch.cat((-right, left), dim=-1)
    return x_BNSH * cos_SH + turned_BNSH * sin_SH


def document_mask(documents_BS: Tensor) -> Tensor:
    """Which positions [B, 1, S, S] see which: those of the same document that are not later."""
    same_BSS = documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1)
    return same_BSS.tril().unsqueeze(1)


class Attention(nn.Module):
    """Causal self-attention; several query heads share one key-value head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads
        self.head_width = config.head_width
        kv_width = config.kv_heads * config.head_width
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor, mask_B1SS: Tensor | None
    ) -> Tensor:
        """[B, S, D] to [B, S, D]; without a mask, each position sees itself and all before it."""
        batch, length, width = x_BSD.shape
        q_BNSH = self._heads(self.q_proj(x_BSD), self.heads)
        k_BKSH = self._heads(self.k_proj(x_BSD), self.kv_heads)
        v_BKSH = self._heads(self.v_proj(x_BSD), self.kv_heads)
        q_BNSH = rotate(q_BNSH, cos_SH, sin_SH)
        k_BKSH = rotate(k_BKSH, cos_SH, sin_SH)
        out_BNSH = F.scaled_dot_product_attention(
            q_BNSH,
            k_BKSH,
            v_BKSH,
            attn_mask=mask_B1SS,
            is_causal=mask_B1SS is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.o_proj(out_BNSH.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]

    def _heads(self, x_BSD: Tensor, heads: int) -> Tensor:
        batch, length, _ = x_BSD.shape
        return x_BSD.view(batch, length, heads, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        h_BSF = F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        return self.down_proj(h_BSF)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then feed-forward, each on the normalised residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor, mask_B1SS: Tensor | None
    ) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos_SH, sin_SH, mask_B1SS)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Token ids to logits; parameters bear the names of Hugging Face's Llama."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        cos_SH, sin_SH = rotary_angles(config)
        self.register_buffer("cos_SH", cos_SH, persistent=False)
        self.register_buffer("sin_SH", sin_SH, persistent=False)
        self.cos_SH: Tensor
        self.sin_SH: Tensor

    def forward(self, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """Token ids [B, S], S at most the context, to logits [B, S, V].

        With `documents_BS`, the number of each token's document, a token sees its own document
        only. Positions go on counting: they are relative, so a document's logits are what they
        are where it stands alone.
        """
        length = tokens_BS.shape[1]
        mask_B1SS = None if documents_BS is None else document_mask(documents_BS)
        cos_SH, sin_SH = self.cos_SH[:length], self.sin_SH[:length]
        x_BSD = self.embed_tokens(tokens_BS)
        for block in self.layers:
            x_BSD = block(x_BSD, cos_SH, sin_SH, mask_B1SS)
        return self.lm_head(self.norm(x_BSD))  # type: ignore[no-any-return]

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter from `seed` alone.

        Matrices are normal with standard deviation 0.7 / sqrt(width), which is GPT-2's 0.02 at
        its width and does not leave narrow models too near zero; those that write to the residual
        stream are smaller by sqrt(2 x layers), so that its variance does not grow with depth.
        """
        generator = torch.Generator().manual_seed(seed)
        normal = 0.7 / math.sqrt(self.config.width)
        into_residual = normal / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = into_residual if name.endswith(("o_proj.weight", "down_proj.weight")) else normal
            parameter.normal_(0.0, std, generator=generator)

    @property
    def parameter_count(self) -> int:
        """Trainable numbers, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
