"""Self-attention and its masks.

Shape suffixes: B batch, S sequence, D model width, N heads, K key-value heads, H head width,
R rotated features, 2 cosine and sine, 1 for every head, T tokens of all rows one after the other,
C bounds of sequences among them.

Papers: grouped-query attention (Ainslie et al. 2023), sliding windows (Beltagy et al. 2020),
latents (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1), sinks (OpenAI 2025, "gpt-oss-120b &
gpt-oss-20b Model Card", section 2.2).
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelines.models.config import DecoderConfig
from pipelines.models.norms import RMSNorm, build_head_norm
from pipelines.models.rotary import rotate
from pipelines.models.weights import local

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# ruff: noqa: N803, N806, N812 (names that end in their shape)


def positions(tokens_BS: Tensor, documents_BS: Tensor | None) -> Tensor:
    """Return each token's offset from the start of its document, [B, S].

    Without documents, the result is [1, S].
    """
    numbers_1S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).unsqueeze(0)
    if documents_BS is None:
        return numbers_1S
    return numbers_1S - numbers_1S.where(_begins(documents_BS), 0).cummax(dim=1).values


def _begins(documents_BS: Tensor) -> Tensor:
    """Return whether a document begins at each token, [B, S]."""
    return documents_BS.diff(dim=1, prepend=documents_BS[:, :1] - 1) != 0


class Sequences(NamedTuple):
    """What `varlen_attn` takes in place of a mask: a token sees earlier ones of its sequence only.

    Attributes:
        bounds_C: Where each sequence begins among the tokens of all rows, and where the last one
            ends, int32. Sequences at the end may be empty.
        longest: The most tokens of a sequence that there can be.
        before: How many tokens before itself a token sees; -1 means all.
    """

    bounds_C: Tensor  # noqa: N815
    longest: int
    before: int


# None means that each token sees itself and all earlier tokens.
Mask: TypeAlias = "Tensor | BlockMask | Sequences | None"
_Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Causal self-attention; several query heads may share one key-value head.

    Attributes:
        arrival: Applied to each projection after all are computed; context parallel waits there.
        context: As the decoder's, which divides heads here.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width, self.value_width = config.head_width, config.value_width
        self.neighbours = config.rope_interleave
        self._project(config)
        self.o_proj = _linear(config, "o_proj", bias=config.output_bias)
        self.q_norm = build_head_norm(config) if config.qk_norm else nn.Identity()
        self.k_norm = build_head_norm(config) if config.qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if config.sinks else None
        self.context = 0, 1
        self.scale = config.score_scale
        self.arrival: nn.Module = nn.Identity()

    def _project(self, config: DecoderConfig) -> None:
        """Make what `_operands` needs."""
        self.q_proj = _linear(config, "q_proj", bias=config.qkv_bias)
        self.k_proj = _linear(config, "k_proj", bias=config.qkv_bias)
        self.v_proj = _linear(config, "v_proj", bias=config.qkv_bias)

    def forward(self, x_BSD: Tensor, rotary_2SR: Tensor | None, mask: Mask) -> Tensor:
        """Map [B, S, D] to [B, S, D].

        Args:
            x_BSD: The normalised residual stream.
            rotary_2SR: The table of at least S positions; None where positions are learned.
            mask: The result of `attention_mask`.
        """
        q_BSNH, k_BSKH, v_BSKH = self._operands(x_BSD)
        # Autocast computes norms in fp32, but FlexAttention requires one type for q, k and v.
        q_BSNH, k_BSKH = (x.type_as(v_BSKH) for x in (self.q_norm(q_BSNH), self.k_norm(k_BSKH)))
        q_BNSH, k_BKSH, v_BKSH = (x.transpose(1, 2) for x in (q_BSNH, k_BSKH, v_BSKH))
        if rotary_2SR is not None:
            table_2SR = rotary_2SR[:, : q_BNSH.shape[2]]
            q_BNSH, k_BKSH = (rotate(x, table_2SR, self.neighbours) for x in (q_BNSH, k_BKSH))
        if self.sinks is None:
            out_BNSH = attend(q_BNSH, k_BKSH, v_BKSH, mask, self.scale)
        else:
            sinks_N = local(self.sinks).chunk(self.context[1])[self.context[0]]
            out_BNSH = attend_with_sinks(q_BNSH, k_BKSH, v_BKSH, mask, sinks_N)
        out_BSNH = out_BNSH.transpose(1, 2)[..., : self.value_width]
        return self.o_proj(out_BSNH.flatten(2))  # type: ignore[no-any-return]

    def _operands(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, not yet rotated."""
        projections = self.q_proj(x_BSD), self.k_proj(x_BSD), self.v_proj(x_BSD)
        # The number of heads is inferred: with tensor parallelism, a process has only its share.
        q, k, v = (self.arrival(each).unflatten(-1, (-1, self.head_width)) for each in projections)
        return q, k, v


class LatentAttention(Attention):
    """Attention whose heads all compute keys and values from a few numbers of a token, its latent.

    A part of each head's query and key is rotated by the position, and that of the key is the same
    in all heads. Values are filled up to the width of queries, which is what kernels take.
    """

    def _project(self, config: DecoderConfig) -> None:
        rank = config.q_lora_rank  # without it, queries come from the stream itself
        self.q_a_proj = _linear(config, "q_a_proj") if rank else nn.Identity()
        # These norms' epsilon is not `norm_eps`, in transformers either.
        self.q_a_layernorm = RMSNorm(rank, eps=1e-6) if rank else nn.Identity()
        self.q_b_proj = _linear(config, "q_b_proj")
        self.kv_a_proj, self.kv_b_proj = (_linear(config, f"kv_{x}_proj") for x in "ab")
        self.k_rope_proj = _linear(config, "k_rope_proj")
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps=1e-6)
        self.rotated = config.rotary_width

    def _operands(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))
        kv = self.kv_b_proj(self.kv_a_layernorm(self.kv_a_proj(x_BSD)))
        plain = self.head_width - self.rotated
        q, kv, k_turned = map(self.arrival, (q, kv, self.k_rope_proj(x_BSD)))
        q, q_turned = q.unflatten(-1, (-1, self.head_width)).tensor_split((plain,), dim=-1)
        k, v = kv.unflatten(-1, (-1, plain + self.value_width)).tensor_split((plain,), dim=-1)
        k_turned = k_turned.unsqueeze(2).expand(-1, -1, k.shape[2], -1)
        # `rotate` turns the first features, DeepSeek's code the last ones: scores are the same.
        q, k = torch.cat((q_turned, q), dim=-1), torch.cat((k_turned, k), dim=-1)
        return q, k, F.pad(v, (0, self.head_width - self.value_width))


def _linear(config: DecoderConfig, name: str, *, bias: bool = False) -> nn.Linear:
    rows, columns = config.attention_shapes[name]
    return nn.Linear(columns, rows, bias=bias)


def attend(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask, scale: float | None = None
) -> Tensor:
    """Return the attention output: each query's weighted sum of visible values, [B, N, S, H].

    Scores are multiplied by `scale`, which is 1 / sqrt(H) by default.
    """
    grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
    if mask is None or isinstance(mask, Tensor):
        if grouped and q_BNSH.device.type == "cuda" and q_BNSH.dtype == torch.float32:
            # No kernel takes groups in fp32: PyTorch would write out all weights of attention.
            group = q_BNSH.shape[1] // k_BKSH.shape[1]
            k_BKSH, v_BKSH = (x.repeat_interleave(group, dim=1) for x in (k_BKSH, v_BKSH))
            grouped = False
        return F.scaled_dot_product_attention(
            q_BNSH, k_BKSH, v_BKSH, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
    if isinstance(mask, Sequences):
        return _attend_within(q_BNSH, k_BKSH, v_BKSH, mask, scale)
    return _flex(q_BNSH, k_BKSH, v_BKSH, block_mask=mask, scale=scale, enable_gqa=grouped)  # type: ignore[no-any-return]


def attend_with_sinks(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask, sinks_N: Tensor
) -> Tensor:
    """Return the same with a further score in each head's softmax, whose value is zero.

    Where FlexAttention computes, its result is scaled by the share that the other scores have.
    Elsewhere the score is that of a further key, the only one with a number in a further feature.
    As a number of the mask it would need a mask for each head, and no fused kernel learns those.
    """
    sinks_N11 = sinks_N.view(-1, 1, 1)
    if not isinstance(mask, Tensor):
        out_BNSH, sums_BNS = _flex(
            q_BNSH, k_BKSH, v_BKSH, block_mask=mask, enable_gqa=True, return_lse=True
        )
        return (sums_BNS.unsqueeze(-1) - sinks_N11).sigmoid().type_as(out_BNSH) * out_BNSH  # type: ignore[no-any-return]
    scale = q_BNSH.shape[-1] ** -0.5
    further_BNS1 = (sinks_N11 / scale).type_as(q_BNSH).expand_as(q_BNSH[..., :1])
    q_BNSH = torch.cat((q_BNSH, further_BNS1), dim=-1)
    k_BKSH, v_BKSH = (F.pad(x, (0, 1, 0, 1)) for x in (k_BKSH, v_BKSH))
    k_BKSH[..., -1, -1] = 1.0
    return attend(q_BNSH, k_BKSH, v_BKSH, F.pad(mask, (0, 1), value=True), scale)[..., :-1]


def _flex(*operands: Tensor, **options: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # torch's other kernel, for rows below 128 tokens, reads queries by wrong strides where a block
    # is compiled without gradients (decision 0028).
    options["kernel_options"] = {"BACKEND": "TRITON"}
    # A block that is being compiled includes this call; otherwise compile the call alone.
    if not torch.compiler.is_compiling():
        return _compiled("flex_attention")(*operands, **options)
    return flex_attention(*operands, **options)  # type: ignore[call-overload]


def _attend_within(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, within: Sequences, scale: float | None
) -> Tensor:
    """Attend within sequences by FlashAttention, which takes bf16 and fp16, on a GPU."""
    from torch.nn.attention.varlen import varlen_attn  # takes seconds

    # The kernel's result has no gaps, and the compiler must know its strides.
    rows = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q_BNSH, k_BKSH, v_BKSH))
    q_TNH, k_TKH, v_TKH = rows
    sizes = within.bounds_C, within.bounds_C, within.longest, within.longest
    seen, grouped = (within.before, 0), q_TNH.shape[1] != k_TKH.shape[1]
    out_TNH: Any = varlen_attn(
        q_TNH, k_TKH, v_TKH, *sizes, scale=scale, window_size=seen, enable_gqa=grouped
    )
    out_BSNH: Tensor = out_TNH.view(len(q_BNSH), -1, *out_TNH.shape[1:])
    return out_BSNH.transpose(1, 2)


def narrower(window: int | None, length: int) -> int | None:
    """Return the window if it hides anything of a row of this length, else None."""
    return window if window is not None and window < length else None


def sequences(
    documents_BS: Tensor | None,
    shape: tuple[int, int],
    window: int | None,
    most_documents: int,
    device: torch.device,
) -> Sequences | None:
    """Return what hides the same as `attention_mask`, for `varlen_attn`.

    The host waits for nothing, so there are always `most_documents` sequences for each row, and
    those at the end are empty. In its backward pass FlashAttention 2 needs memory for 128 tokens
    more for each of them.

    Args:
        documents_BS: As for `attention_mask`; a number that comes again later is another document.
        shape: B and S.
        window: As for `attention_mask`.
        most_documents: The most documents in a row of the data.
        device: That of the tokens.
    """
    batch, length = shape
    window = narrower(window, length)
    if documents_BS is None and window is None:
        return None
    end = batch * length
    if documents_BS is None:
        bounds_C = torch.arange(0, end + 1, length, dtype=torch.int32, device=device)
    else:
        begins_T = _begins(documents_BS).flatten()
        most = min(batch * most_documents, end)
        # More would be taken for the last one's tokens, and nobody would see it.
        torch._assert_async(begins_T.sum() <= most, "a row holds more documents than were counted")
        numbers_T = torch.arange(end, dtype=torch.int32, device=device)
        first_T = numbers_T.where(begins_T, end).sort().values
        bounds_C = F.pad(first_T[:most], (0, 1), value=end)
    return Sequences(bounds_C, longest=length, before=-1 if window is None else window - 1)


def attention_mask(
    documents_BS: Tensor | None, length: int, window: int | None, device: torch.device
) -> Mask:
    """Return the mask that hides later positions, other documents, and positions too far back.

    Args:
        documents_BS: The number of each token's document; None where there is only one.
        length: S.
        window: How many positions a token sees, including itself; None means all. One of S hides
            nothing more, but then there is a mask.
        device: On CUDA the mask is FlexAttention's, with one bit per 128 x 128 positions; elsewhere
            it is a tensor [B or 1, 1, S, S], as FlexAttention has no backward pass there.
    """
    if documents_BS is None and window is None:
        return None
    visible = _visible(documents_BS, window)
    batch = 1 if documents_BS is None else len(documents_BS)
    if device.type == "cuda":
        # Without documents, one mask serves every row of the batch.
        rows = None if documents_BS is None else batch
        made: BlockMask = _compiled("create_block_mask")(
            visible, rows, None, length, length, device=device
        )
        return made
    row_B111 = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    position_S = torch.arange(length, device=device)
    return visible(row_B111, row_B111, position_S.unsqueeze(1), position_S)


def _visible(documents_BS: Tensor | None, window: int | None) -> _Visible:
    """Return a `mask_mod` for FlexAttention; it also accepts index tensors that broadcast."""

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        if documents_BS is not None:
            seen = seen & (documents_BS[row, query] == documents_BS[row, key])
        return seen

    return visible


@cache
def _compiled(name: str) -> Callable[..., Any]:
    """Return a compiled function of FlexAttention, which is slow to import and slow uncompiled."""
    from torch.nn.attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(getattr(flex_attention, name))
    return compiled
