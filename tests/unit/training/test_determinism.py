from collections.abc import Callable

import torch


def test_it_is_as_the_recipe_says(start: Callable) -> None:
    run = start("wanted", steps=2, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    run.trainer.fit()
    assert len(run.points) == 2
    start("not", steps=2)
    assert not torch.are_deterministic_algorithms_enabled()
