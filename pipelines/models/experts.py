"""A mixture of experts: each token goes through a few of many feed-forward layers.

Nothing is dropped: an expert takes all tokens that choose it, and the host does not wait to learn
how many, unless they have to travel (`parallel/expert_parallel.py`). The weights of all experts of
a layer are one parameter.

Shape suffixes: B batch, S sequence, D model width, F width of an expert, E experts, K experts of a
token, T tokens of all rows, R routes (T times K).

Papers: mixtures (Shazeer et al. 2017), the balance loss (Fedus et al. 2021, "Switch Transformers",
equations 4 to 6) by sequence (DeepSeek-AI 2024, "DeepSeek-V3", equations 17 to 20), biases that
balance without a loss (the same, equation 16), the z-loss (Zoph et al. 2022, "ST-MoE", equation 5),
the clamped gate (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2).
"""

# ruff: noqa: N803, N806, N812 (names that end in their shape)

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh

from pipelines.models.config import DecoderConfig
from pipelines.models.weights import is_sharded


class Router(nn.Module):
    """Chooses the experts of each token, and how much each of them counts.

    Attributes:
        balance: The weight of the balance loss.
        z: The weight of the z-loss.
        share: The weight of a token's loss in a step, as in `ForwardBackward`; both losses have it.
        sequence: The processes that each have a part of every sequence.
        routes_E: How many tokens have chosen each expert in training, and again wherever they are
            routed again for activation checkpointing.
        e_score_correction_bias: Of each expert, what is added to its score for the choice alone;
            `training/routing.py` moves it. None if experts compete by a softmax.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as of nn.Linear
        self.bias = nn.Parameter(torch.zeros(config.experts)) if config.mlp_bias else None
        self.chosen = config.experts_per_token
        self.normalised, self.scale = config.norm_topk_prob, config.routed_scaling_factor
        self.groups = config.n_group, config.topk_group
        self.balance = self.z = 0.0
        self.sequence: DeviceMesh | None = None
        self.share: Tensor = nn.Buffer(torch.zeros(()), persistent=False)
        # No `nn.Buffer`, as the compiler can't add to one.
        self.register_buffer("routes_E", torch.zeros(config.experts), persistent=False)
        self.routes_E: Tensor
        bias = nn.Buffer(torch.zeros(config.experts)) if config.sigmoid_router else None
        self.e_score_correction_bias: Tensor | None = bias

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each token's experts, [B, S, K], and their weights, [B, S, K], in fp32 at least;
        and how often each expert was chosen in each row, [B, E].

        The gradients of balance loss and z-loss are those of the weights, too: the losses
        themselves appear nowhere.
        """
        bias_E = None if self.bias is None else part_here(self.bias)
        logits_BSE = F.linear(x_BSD, part_here(self.weight), bias_E)
        logits_BSE = logits_BSE.to(torch.promote_types(logits_BSE.dtype, torch.float32))
        if self.e_score_correction_bias is None:
            scores_BSE = logits_BSE.softmax(dim=-1)
            weights_BSK, experts_BSK = scores_BSE.topk(self.chosen, dim=-1)
        else:
            scores_BSE = logits_BSE.sigmoid()
            experts_BSK = self._choose(scores_BSE.detach() + self.e_score_correction_bias)
            weights_BSK = scores_BSE.gather(-1, experts_BSK)
            scores_BSE = scores_BSE / scores_BSE.sum(dim=-1, keepdim=True)  # for the losses
        if self.normalised:
            weights_BSK = weights_BSK / (weights_BSK.sum(dim=-1, keepdim=True) + 1e-20)
        weights_BSK = weights_BSK * self.scale
        routes_BE = count_routes(experts_BSK.flatten(1), len(self.weight))
        if self.training and torch.is_grad_enabled():
            self.routes_E += routes_BE.sum(dim=0)
            loss = self._losses(logits_BSE, scores_BSE, routes_BE)
            weights_BSK = _WithLoss.apply(weights_BSK, loss, self.share)  # type: ignore[no-untyped-call]
        return experts_BSK, weights_BSK, routes_BE

    def _choose(self, scores_BSE: Tensor) -> Tensor:
        """Return the best experts of the best groups, which are those whose best two are best."""
        groups, kept = self.groups
        if kept < groups:
            scores_BSGX = scores_BSE.view(*scores_BSE.shape[:-1], groups, -1)
            best_BSG = scores_BSGX.topk(2, dim=-1).values.sum(dim=-1)
            shut_BSG = best_BSG < best_BSG.topk(kept, dim=-1).values[..., -1:]
            scores_BSE = scores_BSGX.masked_fill(shut_BSG.unsqueeze(-1), -math.inf).flatten(-2)
        return scores_BSE.topk(self.chosen, dim=-1).indices

    def restart(self) -> None:
        """Begin to count, with losses that have no weight yet."""
        self.share.zero_()
        self.routes_E.zero_()

    def _losses(self, logits_BSE: Tensor, scores_BSE: Tensor, routes_BE: Tensor) -> Tensor:
        """Return balance loss and z-loss, summed over tokens.

        The balance of a sequence is at least 1, where all experts are chosen equally often.
        """
        experts = len(self.weight)
        length = logits_BSE.shape[1]
        if self.sequence is not None:
            length *= self.sequence.size()
            routes_BE = all_reduce(routes_BE, "sum", self.sequence)
        often_BE = routes_BE * (experts / self.chosen / length)
        balance = (often_BE.unsqueeze(1) * scores_BSE).sum()
        z = logits_BSE.logsumexp(dim=-1).square().sum()
        return self.balance * balance + self.z * z


def part_here(parameter: Tensor, factor: float = 1.0) -> Tensor:
    """Return what a process has of a parameter, whose gradient is multiplied by a factor.

    Where tensor-parallel processes have the same, each one's gradient is a part of the whole one.
    """
    if not is_sharded(parameter):
        return parameter
    from torch.distributed.tensor import Partial

    placements = [Partial() if each.is_replicate() else each for each in parameter.placements]
    here: Tensor = parameter.to_local(grad_placements=placements)
    if here.requires_grad and factor != 1:
        here.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return here


def count_routes(experts_BR: Tensor, experts: int) -> Tensor:
    """Return how often each expert occurs in each row, [B, E], in fp32."""
    ones_BR = torch.ones_like(experts_BR, dtype=torch.float32)
    return ones_BR.new_zeros(len(experts_BR), experts).scatter_add(1, experts_BR, ones_BR)


class _WithLoss(torch.autograd.Function):
    """Returns its input; in the backward pass a loss beside it has the gradient `share`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (share,) = ctx.saved_tensors
        return gradient, share.to(ctx.dtype), None


class ExpertLinear(nn.Module):
    """The same linear layer of all experts; the weight is [E, out, in], the bias [E, out] if any.

    Attributes:
        gradient_factor: What the gradients of weight and bias are multiplied by.
        bias_factor: What the bias is multiplied by; below 1 where processes add up their results.
    """

    gradient_factor = bias_factor = 1.0

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        nn.init.kaiming_uniform_(self.weight.flatten(0, 1), a=math.sqrt(5))
        self.bias = nn.Parameter(torch.zeros(experts, outputs)) if bias else None

    def forward(self, x_RD: Tensor, routes_E: Tensor) -> Tensor:
        """Map [R, in], sorted by expert, to [R, out]; `routes_E` says how many each expert has."""
        weight_EFD = part_here(self.weight, self.gradient_factor)
        out_RF = product_by_expert(x_RD, weight_EFD, routes_E)
        if self.bias is None:
            return out_RF
        bias_EF = part_here(self.bias, self.gradient_factor) * self.bias_factor
        ends_E, rows_R = routes_E.cumsum(0), torch.arange(len(x_RD), device=x_RD.device)
        # A product, as the gradient of a look-up would be added up row by row; and this one, as
        # selective checkpointing would keep the result of `addmm`.
        has_RE = (rows_R[:, None] < ends_E) & (rows_R[:, None] >= ends_E - routes_E)
        return torch.addbmm(out_RF, has_RE.to(bias_EF.dtype)[None], bias_EF[None])


_Through = Callable[[Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """A feed-forward layer whose weights a router chooses for each token.

    Attributes:
        exchange: Has other processes' experts compute, where they have some of the layer's.
    """

    def __init__(self, config: DecoderConfig, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        experts, width, hidden = config.experts, config.width, config.hidden
        self.router = Router(config)
        self.gate_proj = ExpertLinear(experts, width, hidden, bias=config.mlp_bias)
        self.up_proj = ExpertLinear(experts, width, hidden, bias=config.mlp_bias)
        self.down_proj = ExpertLinear(experts, hidden, width, bias=config.mlp_bias)
        self.activation, self.gate_limit = activation, config.gate_limit
        self.exchange: Callable[[_Through, Tensor, Tensor], Tensor] = _all_here

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        experts_BSK, weights_BSK, routes_BE = self.router(x_BSD)
        order_R = experts_BSK.flatten().argsort(stable=True)
        places_R = inverse(order_R)
        routes_E = routes_BE.sum(dim=0).to(torch.int32)
        x_TKD = x_BSD.flatten(0, 1).unsqueeze(1).expand(-1, experts_BSK.shape[-1], -1)
        x_RD = permuted(x_TKD.flatten(0, 1), order_R, places_R)
        y_RD = permuted(self.exchange(self._through, x_RD, routes_E), places_R, order_R)
        y_TKD = y_RD.view(*x_TKD.shape)
        weights_TK1 = weights_BSK.flatten(0, 1).unsqueeze(-1).to(y_TKD.dtype)
        out_TD: Tensor = (y_TKD * weights_TK1).sum(dim=1)
        # Autocast adds up in fp32, but the residual stream has one type.
        return out_TD.to(y_TKD.dtype).view_as(x_BSD)

    def _through(self, x_RD: Tensor, routes_E: Tensor) -> Tensor:
        """Map rows that are sorted by expert."""
        gate_RF, up_RF = self.gate_proj(x_RD, routes_E), self.up_proj(x_RD, routes_E)
        if self.gate_limit is not None:  # x sigmoid(1.702 x) is SiLU(1.702 x) / 1.702
            gate_RF = gate_RF.clamp(max=self.gate_limit) * 1.702
            up_RF = (up_RF.clamp(-self.gate_limit, self.gate_limit) + 1) / 1.702
        h_RF = self.activation(gate_RF) * up_RF
        out_RD: Tensor = self.down_proj(h_RF, routes_E)
        return out_RD


def _all_here(through: _Through, x_RD: Tensor, routes_E: Tensor) -> Tensor:
    return through(x_RD, routes_E)


def inverse(order_R: Tensor) -> Tensor:
    """Return the order that undoes an order."""
    numbers_R = torch.arange(len(order_R), device=order_R.device)
    return torch.empty_like(order_R).scatter_(0, order_R, numbers_R)


def permuted(x_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
    """Return the rows in another order; `back_R` is the inverse of `order_R`.

    So the gradient is gathered, too: torch would add it up row by row, as rows could come twice.
    """
    return _Permuted.apply(x_RD, order_R, back_R)  # type: ignore[no-any-return, no-untyped-call]


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.save_for_backward(back_R)
        return x_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, gradient_RD: Tensor) -> Any:
        (back_R,) = ctx.saved_tensors
        return gradient_RD.index_select(0, back_R), None, None


def product_by_expert(x_RD: Tensor, weight_EFD: Tensor, routes_E: Tensor) -> Tensor:
    """Return each expert's rows times its weight, [R, F].

    Args:
        x_RD: The rows of the first expert, then those of the second, and so on.
        weight_EFD: The weight of each expert.
        routes_E: The number of rows of each expert, int32.
    """
    kind = x_RD.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x_RD, weight_EFD = x_RD.to(dtype), weight_EFD.to(dtype)
    is_aligned = not any(size % 8 for size in weight_EFD.shape[1:])  # not so a rank of 4
    if kind == "cuda" and x_RD.dtype == torch.bfloat16 and is_aligned:
        ends_E = routes_E.cumsum(0, dtype=torch.int32)
        grouped: Tensor = F.grouped_mm(x_RD, weight_EFD.transpose(1, 2), offs=ends_E)
        return grouped
    product: Callable[..., Tensor] = torch.ops.penstock.product_by_expert
    return product(x_RD, weight_EFD, routes_E)


# One kernel for all experts exists for bf16 on a GPU. These do the same one expert after the other,
# and are operators so that a block that has them is compiled whole.


@torch.library.custom_op("penstock::product_by_expert", mutates_args=())
def _product_by_expert(x_RD: Tensor, weight_EFD: Tensor, routes_E: Tensor) -> Tensor:
    rows = torch.split(x_RD, routes_E.tolist())
    return torch.cat([x @ weight.T for x, weight in zip(rows, weight_EFD, strict=True)])


@_product_by_expert.register_fake
def _(x_RD: Tensor, weight_EFD: Tensor, routes_E: Tensor) -> Tensor:  # noqa: ARG001
    return x_RD.new_empty(len(x_RD), weight_EFD.shape[1])


@torch.library.custom_op("penstock::gradient_by_expert", mutates_args=())
def _gradient_by_expert(gradient_RF: Tensor, x_RD: Tensor, routes_E: Tensor) -> Tensor:
    """Return the gradient of each expert's weight, [E, F, D]."""
    rows = (torch.split(each, routes_E.tolist()) for each in (gradient_RF, x_RD))
    return torch.stack([gradient.T @ x for gradient, x in zip(*rows, strict=True)])


@_gradient_by_expert.register_fake
def _(gradient_RF: Tensor, x_RD: Tensor, routes_E: Tensor) -> Tensor:
    return x_RD.new_empty(len(routes_E), gradient_RF.shape[1], x_RD.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_RD, weight_EFD, routes_E = ctx.saved_tensors
    gradient_RF = gradient_RF.contiguous()
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.penstock.product_by_expert(
            gradient_RF, weight_EFD.transpose(1, 2), routes_E
        )
    if ctx.needs_input_grad[1]:
        of_weight = torch.ops.penstock.gradient_by_expert(gradient_RF, x_RD, routes_E)
    return of_x, of_weight, None


_product_by_expert.register_autograd(_backward, setup_context=_keep)
