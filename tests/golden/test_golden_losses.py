import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipelines.recipe.recipe_files import load_recipe, shipped_recipes
from tests.golden.losses import FOLDER, golden, losses

REWRITE = "if that was meant: .venv/bin/python -m tests.golden.losses"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_first_losses_of_a_recipe_are_what_they_were(name: str, tmp_path: Path) -> None:
    kept = json.loads(golden(name).read_text())
    assert losses(load_recipe(name), tmp_path) == pytest.approx(kept, rel=1e-4), REWRITE


def test_each_shipped_recipe_has_its_losses_and_no_other_has() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(shipped_recipes()), REWRITE
