from dataclasses import replace

import pytest
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


@pytest.mark.parametrize("kind", ["adamw", "muon", "adamw_8bit"])
def test_biases_of_experts_are_no_matrices(kind: str) -> None:
    shape = replace(SHAPE, experts=4, experts_per_token=2, mlp_bias=True, sinks=True)
    model = Parallelized(build_mesh(Layout(), torch.device("cpu")), [Transformer(shape)])
    optimizer = build_optimizer(model, Train(optimizer=kind, weight_decay=0.3, compile=False))
    names = {each: name for name, each in model.trained().items()}
    for group in optimizer.param_groups:
        matrices = [
            names[each].endswith(("_proj.weight", "tokens.weight", "router.weight"))
            for each in group["params"]
        ]
        assert set(matrices) == {group["weight_decay"] > 0}
