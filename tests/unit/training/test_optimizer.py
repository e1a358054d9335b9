import pytest
import torch

from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import Parallelized
from pipelines.recipe.training_section import Train
from pipelines.training.optimizer import build_optimizer, learning_rate
from tests.unit.training.conftest import SHAPE


def test_the_rate_warms_up_and_then_follows_a_cosine() -> None:
    train = Train(steps=110, warmup_steps=10, lr=1.0, min_lr_ratio=0.2)
    rates = [learning_rate(step, train) for step in range(111)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.6)
    assert rates[110] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_no_warm_up_begins_at_the_peak() -> None:
    assert learning_rate(0, Train(steps=1, warmup_steps=0, lr=0.5)) == 0.5


def test_only_matrices_decay() -> None:
    model = Parallelized(build_mesh(Layout(), torch.device("cpu")), [Transformer(SHAPE)])
    decayed, free = build_optimizer(model, Train(weight_decay=0.3)).param_groups
    assert {each.ndim for each in decayed["params"]} == {2}
    assert {each.ndim for each in free["params"]} == {1}
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert len(decayed["params"]) + len(free["params"]) == len(model.trained())
