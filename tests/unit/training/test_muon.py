import math

import pytest
import torch
from torch import Tensor, nn

from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import Parallelized, parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.training_section import Train
from pipelines.training.guard import step_unless
from pipelines.training.optimizer import Muon, build_optimizer, orthogonalised
from tests.settled import FP32
from tests.unit.training.conftest import SHAPE


def test_it_is_torchs_muon_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pipelines.training.optimizer._TOGETHER", 2 * 8 * 16
    )  # two of the larger ones at once
    shapes = [(8, 16), (16, 8), (8, 8), (16, 8), (8, 16)]
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(each.detach().clone()) for each in ours]
    norm = nn.Parameter(torch.ones(4))
    optimizer = Muon(ours, torch.optim.AdamW([norm], lr=0.02), lr=0.02, weight_decay=0.3)
    reference = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.3, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        norm.grad = torch.randn(4)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0)  # both in bf16
    assert optimizer.state[norm]["step"].item() == 3


@pytest.mark.parametrize("shape", [(3, 8, 16), (3, 16, 8)])
def test_each_expert_is_a_matrix_of_its_own(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    together = nn.Parameter(torch.randn(shape))
    apart = [nn.Parameter(each.detach().clone()) for each in together]
    rates = {"lr": 0.02, "weight_decay": 0.3}
    optimizers = Muon([together], None, **rates), Muon(apart, None, **rates)
    for _ in range(3):
        together.grad = torch.randn(shape)
        for one, gradient in zip(apart, together.grad, strict=True):
            one.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(together, torch.stack(list(apart)), atol=1e-6, rtol=0)


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(2, 12, 40)))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_matrices_of_blocks_are_muons_and_the_rest_adamws() -> None:
    model = _parallelized()
    optimizer = build_optimizer(model, Train(optimizer="muon", weight_decay=0.3))
    kinds = [
        {name for name, each in model.trained().items() if any(each is p for p in group["params"])}
        for group in optimizer.param_groups
    ]
    assert {name.split(".")[-2] for name in kinds[0]} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert kinds[1] == {"embed_tokens.weight"}
    assert "norm.weight" in kinds[2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]
    assert sum(map(len, kinds)) == len(model.trained())


def test_a_parameter_without_a_gradient_stays() -> None:
    matrix = nn.Parameter(torch.ones(2, 3))
    other = nn.Parameter(torch.ones(1))
    Muon([matrix], torch.optim.AdamW([other]), lr=0.1, weight_decay=0.1).step()
    assert torch.equal(matrix, torch.ones(2, 3))


def test_a_bad_step_changes_nothing_and_the_host_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    matrix, other = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5))
    adamw = torch.optim.AdamW([other], lr=0.1, fused=True)
    optimizer = Muon([matrix], adamw, lr=0.1, weight_decay=0.1)

    def waits(_: Tensor) -> None:
        raise AssertionError("the host waited for the device")

    def step(gradient: float, bad: float) -> tuple[Tensor, ...]:
        for each in (matrix, other):
            each.grad = torch.full_like(each, gradient)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "item", waits)
            patch.setattr(Tensor, "__bool__", waits)
            step_unless(torch.tensor(bad), optimizer)
        moments = [optimizer.state[matrix]["momentum"], optimizer.state[other]["exp_avg"]]
        return tuple(each.detach().clone() for each in (matrix, other, *moments))

    first = matrix.detach().clone()
    assert torch.equal(step(math.nan, 1.0)[0], first)
    good = step(1.0, 0.0)
    assert not torch.equal(good[0], first)
    assert all(map(torch.equal, step(math.nan, 1.0), good))


def _parallelized() -> Parallelized:
    recipe = Recipe.model_validate({"name": "t", "train": FP32})
    mesh = build_mesh(Layout(), torch.device("cpu"))
    return parallelize(Transformer(SHAPE), mesh, recipe)
