from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.experts import ExpertLinear, Experts, product_by_expert
from pipelines.models.presets import preset

SHAPE = DecoderConfig(
    layers=1, width=16, heads=2, kv_heads=2, hidden=24, experts=4, experts_per_token=2
)


def test_each_row_has_its_expert_s_bias() -> None:
    layer = ExpertLinear(4, 3, 5, bias=True).double()
    assert layer.bias is not None
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(7, 3, dtype=torch.float64)
    owners = torch.tensor([0, 0, 2, 2, 2, 2, 3])
    found = layer(x, owners.bincount(minlength=4).int())
    expected = torch.einsum("rd,rfd->rf", x, layer.weight[owners]) + layer.bias[owners]
    torch.testing.assert_close(found, expected)
    layer(x[:0], torch.zeros(4, dtype=torch.int32)).sum().backward()  # no row at all
    assert not layer.bias.grad.any()


def mixture(**fields: object) -> Experts:
    torch.manual_seed(0)
    return Experts(replace(SHAPE, **fields), nn.functional.silu).double()


def test_a_token_goes_through_its_experts_and_no_others() -> None:
    layer, x = mixture(), torch.randn(3, 5, 16, dtype=torch.float64)
    chosen, weights, _ = layer.router(x)
    expected = torch.zeros_like(x)
    for number in range(4):
        gate, up, down = (
            each.weight[number] for each in (layer.gate_proj, layer.up_proj, layer.down_proj)
        )
        out = (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        expected += out * (weights * (chosen == number)).sum(dim=-1, keepdim=True)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("numbers", [[2, 0, 4, 1], [0, 0, 7, 0]])
def test_products_by_expert_have_the_right_gradients(numbers: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    routes = torch.tensor(numbers, dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda *given: product_by_expert(*given, routes), (x, weight))


def of_transformers(logits: Tensor, chosen: int) -> Tensor:
    """The balance loss of one sequence, which transformers does not divide by K."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return load_balancing_loss_func((logits.flatten(0, 1),), logits.shape[-1], chosen) / chosen


@pytest.mark.parametrize(("balance", "z"), [(0.3, 0.0), (0.0, 0.7), (0.3, 0.7)])
def test_the_losses_of_a_router_are_seen_in_gradients_alone(balance: float, z: float) -> None:
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    layer, share = mixture(), 0.125
    plain = torch.autograd.grad(layer(x).square().sum(), layer.router.weight)[0]
    router = layer.router
    router.balance, router.z = balance, z
    router.share.fill_(share)
    out = layer(x)
    torch.testing.assert_close(out, mixture()(x), atol=0, rtol=0)
    seen = torch.autograd.grad(out.square().sum(), router.weight)[0]
    logits = x @ router.weight.T
    tokens = logits.shape[1]
    loss = balance * tokens * of_transformers(logits.float(), 2).double()
    loss = loss + z * logits.logsumexp(dim=-1).square().sum()
    expected = torch.autograd.grad(share * loss, router.weight)[0]
    torch.testing.assert_close(seen - plain, expected, atol=1e-6, rtol=1e-5)


def test_routes_are_counted_in_training_only() -> None:
    layer, x = mixture(), torch.randn(2, 6, 16, dtype=torch.float64)
    layer.eval()(x)
    with torch.no_grad():
        layer.train()(x)
    assert layer.router.routes_E.sum() == 0
    layer(x)
    assert layer.router.routes_E.sum() == 2 * 6 * 2
    chosen, *_ = layer.router(x)
    assert layer.router.routes_E.tolist() == (2 * chosen.flatten().bincount(minlength=4)).tolist()


def test_a_token_s_experts_are_of_its_best_groups_and_biases_only_choose() -> None:
    layer = mixture(experts=8, n_group=4, topk_group=2, sigmoid_router=True, norm_topk_prob=True)
    layer.router.scale = 2.5
    layer.router.weight.data.zero_()
    biases = torch.tensor([0.9, 0.0, 0.5, 0.5, 0.0, 0.0, 0.6, 0.3])  # the first group is third
    layer.router.e_score_correction_bias.copy_(biases)
    chosen, weights, _ = layer.router(torch.randn(1, 3, 16, dtype=torch.float64))
    assert chosen.sort().values.tolist() == [[[2, 6]] * 3]
    torch.testing.assert_close(weights, torch.full_like(weights, 1.25))


def test_published_sizes() -> None:
    deepseek = preset("deepseek-v3")
    # "671B total parameters with 37B activated", without the layer that guesses a second token.
    assert (deepseek.parameters, deepseek.active_parameters) == (671_026_404_352, 37_552_282_624)
    mixtral, qwen = preset("mixtral-8x7b"), preset("qwen3-30b-a3b")
    assert (mixtral.parameters, mixtral.active_parameters) == (46_702_792_704, 12_879_925_248)
    oss, larger = preset("gpt-oss-20b"), preset("gpt-oss-120b")
    # What transformers' models on the meta device count; the cards leave out the embeddings.
    assert (oss.parameters, oss.active_parameters) == (20_914_757_184, 4_187_440_704)
    assert (larger.parameters, larger.active_parameters) == (116_829_156_672, 5_711_982_912)
    # "30.5B in total and 3.3B activated", says its model card.
    assert (qwen.parameters, qwen.active_parameters) == (30_532_122_624, 3_353_032_704)


def test_a_token_can_not_have_more_experts_than_there_are() -> None:
    with pytest.raises(UserError, match=r"experts_per_token\(5\) must be from 1 to experts\(4\)"):
        replace(SHAPE, experts_per_token=5)
