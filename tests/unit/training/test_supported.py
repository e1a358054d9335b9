import pytest

from pipelines.core.errors import UserError
from pipelines.core.recipe_files import load_recipe, shipped_recipes
from pipelines.training.supported import supported


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_run(name: str) -> None:
    supported(load_recipe(name))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("parallel.tp=2", r"parallel\.tp = 2"),
        ("parallel.sharding=full", r"parallel\.sharding = 'full'"),
        ("parallel.dp_replicate=3", r"dp_replicate\(3\) must equal resources\.workers\(2\)"),
        ("adapter.kind=lora", r"adapter\.kind = 'lora'"),
        ("train.precision=fp8", r"train\.precision = 'fp8'"),
        ("resources.workers=99", r"workers\(99\)"),
        ("model.preset=lama-1m", "did you mean llama-1m"),
    ],
)
def test_what_the_engine_cannot_do_is_one_line(override: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        supported(load_recipe("debug", [override]))
