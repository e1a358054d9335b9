"""AdamW with moments in 8 bits: torchao's update on plain tensors, and what a step may not do."""

import math

import pytest
import torch
from torch import Tensor, nn

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.presets import preset
from pipelines.models.transformer import Transformer
from pipelines.parallel.division import check_division, moments_block
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.training_section import Train
from pipelines.training.guard import step_unless
from pipelines.training.optimizer import (
    AdamW8bit,
    build_optimizer,
    compiled_update,
    dynamic_numbers,
)
from tests.compiling import needs_a_linker
from tests.settled import FP32
from tests.unit.training.conftest import SHAPE

RATES = {"lr": 0.02, "weight_decay": 0.3}
BETAS = (0.9, 0.95)


def made(matrices: list[nn.Parameter], *, compiled: bool = False) -> AdamW8bit:
    optimizer = AdamW8bit(matrices, None, **RATES)
    optimizer.betas = BETAS
    optimizer.rule = compiled_update() if compiled else None
    return optimizer


def gradients(matrix: Tensor) -> list[Tensor]:
    """Some whose sizes differ by orders of magnitude, as those of real layers do."""
    torch.manual_seed(1)
    sizes = 10 ** torch.empty_like(matrix).uniform_(-2, 0)
    return [torch.randn_like(matrix) * sizes for _ in range(6)]


def trained(matrix: Tensor, *, compiled: bool = False) -> tuple[Tensor, AdamW8bit]:
    parameter = nn.Parameter(matrix.clone())
    optimizer = made([parameter], compiled=compiled)
    for gradient in gradients(matrix):
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach(), optimizer


@pytest.fixture
def matrix() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(24, 128)


def test_its_steps_are_torchaos(matrix: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    monkeypatch.setattr("pipelines.training.optimizer._AT_ONCE", 640)  # some blocks at a time
    ours, _ = trained(matrix)
    theirs = matrix.clone()
    moments = [OptimState8bit.zeros(matrix.shape, signed, 64) for signed in (True, False)]
    for step, gradient in enumerate(gradients(matrix), 1):
        rate = torch.tensor(RATES["lr"])
        number = torch.tensor(float(step))
        rest = (rate, *BETAS, RATES["weight_decay"], 1e-8, True, False)
        single_param_adam(theirs, gradient, number, *moments, None, *rest)
    # Where theirs rounds a second moment to zero, ours does not, and takes a smaller step.
    same = torch.isclose(ours, theirs, atol=1e-5, rtol=0)
    assert same.float().mean() > 0.97
    torch.testing.assert_close(ours[same], theirs[same], atol=1e-5, rtol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_its_numbers_are_torchaos(signed: bool) -> None:
    from torchao.optim.quant_utils import create_dynamic_map

    assert dynamic_numbers(signed=signed) == pytest.approx(create_dynamic_map(signed=signed))


def test_it_is_near_adamw_with_moments_in_fp32(matrix: Tensor) -> None:
    exact = nn.Parameter(matrix.clone())
    adamw = torch.optim.AdamW([exact], **RATES, betas=BETAS)
    for gradient in gradients(matrix):
        exact.grad = gradient.clone()
        adamw.step()
    moved = (exact - matrix).norm()
    ours, _ = trained(matrix)
    assert 0 < (ours - exact).norm() / moved < 0.2


def test_the_moments_are_a_quarter_of_those_in_fp32(matrix: Tensor) -> None:
    _, optimizer = trained(matrix)
    (state,) = (each for each in optimizer.state.values() if "exp_avg_scale" in each)
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.uint8
    held = sum(each.nbytes for each in state.values())
    assert held == matrix.numel() * 2 + matrix.numel() // 64 * 2 * 4 + 4


def test_no_second_moment_becomes_zero(matrix: Tensor) -> None:
    parameter = nn.Parameter(matrix.clone())
    optimizer = made([parameter])
    parameter.grad = torch.full_like(matrix, 1e-6)
    parameter.grad[:, 0] = 1.0  # the largest of its block by far
    optimizer.step()
    before = parameter.detach().clone()
    parameter.grad = torch.full_like(matrix, 1e-12)
    optimizer.step()
    assert (parameter - before).abs().max() < 10 * RATES["lr"]


@needs_a_linker
def test_compiled_it_does_the_same(matrix: Tensor) -> None:
    torch.testing.assert_close(trained(matrix, compiled=True)[0], trained(matrix)[0])


def test_a_process_without_a_row_does_nothing() -> None:
    empty = nn.Parameter(torch.empty(0, 64))
    optimizer = made([empty])
    empty.grad = torch.empty(0, 64)
    optimizer.step()
    assert optimizer.state[empty]["exp_avg_scale"].shape == (0, 1)


def test_a_bad_step_changes_nothing_and_the_host_does_not_wait(
    matrix: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = nn.Parameter(matrix.clone())
    optimizer = made([parameter])

    def waits(_: Tensor) -> None:
        raise AssertionError("the host waited for the device")

    def step(gradient: float, bad: float) -> list[Tensor]:
        parameter.grad = torch.full_like(matrix, gradient)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "item", waits)
            patch.setattr(Tensor, "__bool__", waits)
            step_unless(torch.tensor(bad), optimizer)
        return [each.detach().clone() for each in (parameter, *optimizer.state[parameter].values())]

    assert torch.equal(step(math.nan, 1.0)[0], matrix)
    good = step(1.0, 0.0)
    assert not torch.equal(good[0], matrix)
    assert all(map(torch.equal, step(math.nan, 1.0), good))


def test_matrices_of_blocks_are_in_8_bits_and_embeddings_and_norms_are_not() -> None:
    recipe = Recipe.model_validate({"name": "t", "train": FP32})
    model = parallelize(Transformer(SHAPE), build_mesh(Layout(), torch.device("cpu")), recipe)
    optimizer = build_optimizer(model, Train(**FP32 | {"optimizer": "adamw_8bit"}))
    for each in model.trained().values():
        each.grad = torch.ones_like(each)
    optimizer.step()
    in_8_bits = {
        name.split(".")[-2]
        for name, each in model.trained().items()
        if "exp_avg_scale" in optimizer.state[each]
    }
    assert in_8_bits == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


@pytest.mark.parametrize(
    ("model", "tp", "refused"),
    [
        (preset("llama3-8b"), 8, ""),
        (preset("llama2-7b"), 4, ""),
        (preset("llama2-7b"), 8, r"64 don't divide the 1376 numbers of a row of down_proj"),
    ],
)
def test_a_row_is_divided_into_whole_blocks(model: DecoderConfig, tp: int, refused: str) -> None:
    train = FP32 | {"optimizer": "adamw_8bit"}
    recipe = Recipe.model_validate(
        {"name": "t", "train": train, "parallel": {"tp": tp}, "data": {"sequence_length": 2048}}
    )
    assert moments_block(model.hidden) == 64
    if not refused:
        check_division(model, Layout(tp=tp), recipe)
        return
    with pytest.raises(UserError, match=refused):
        check_division(model, Layout(tp=tp), recipe)
