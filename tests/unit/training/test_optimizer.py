import torch

from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import Parallelized
from pipelines.recipe.training_section import Train
from pipelines.training.optimizer import build_optimizer
from tests.unit.training.conftest import SHAPE


def test_only_matrices_decay() -> None:
    model = Parallelized(build_mesh(Layout(), torch.device("cpu")), [Transformer(SHAPE)])
    decayed, free = build_optimizer(model, Train(weight_decay=0.3)).param_groups
    assert {each.ndim for each in decayed["params"]} == {2}
    assert {each.ndim for each in free["params"]} == {1}
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert len(decayed["params"]) + len(free["params"]) == len(model.trained())
