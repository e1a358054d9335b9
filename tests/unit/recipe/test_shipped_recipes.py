"""Every shipped recipe can be run on what its description says, once its paths are there."""

import re

import pytest

from pipelines.models.presets import preset
from pipelines.parallel.layout import resolve_layout
from pipelines.planning.layout_rule import choose
from pipelines.planning.precision_rule import Device, settle_precision
from pipelines.recipe.recipe_files import load_recipe, shipped_recipes

BASES = {
    "llama3-8b-lora": "llama3-8b",
    "llama3-8b-qlora": "llama3-8b",
    "llama3-8b-dpo": "llama3-8b",
    "qwen3-30b-a3b-lora": "qwen3-30b-a3b",
}
RECIPES = [load_recipe(name) for name in shipped_recipes()]


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.name)
def recipe(request):
    return request.param


def test_it_says_in_one_line_what_it_needs(recipe):
    assert "\n" not in recipe.description
    assert len(f"{recipe.name}  {recipe.description}") <= 130
    assert re.search(r"GPU|core|[Ss]econds", recipe.description)


def test_its_model_exists(recipe):
    if recipe.model.init_from is None:
        preset(recipe.model.preset)
    assert recipe.adapter.kind == "none" or recipe.model.init_from is not None


def test_its_layout_fits_its_workers(recipe):
    workers = recipe.resources.workers
    layout = resolve_layout(recipe.parallel, workers)
    assert layout.world == workers
    assert recipe.train.global_batch_size >= layout.dp
    if recipe.model.init_from is None:
        shape = preset(recipe.model.preset)
        assert shape.kv_heads % layout.tp == 0
        assert shape.layers >= layout.pp


def test_it_fits_the_devices_that_it_names(recipe):
    if named := re.search(r"(\d+) GB", recipe.description):
        shape = preset(BASES.get(recipe.name, recipe.model.preset))
        device = int(named[1]) * 10**9
        there = settle_precision(recipe, Device(is_cpu=False, has_bf16=True))
        choice = choose(there, shape, recipe.resources.workers, device)
        compiled = recipe.parallel.ep == 1  # the exchanges of expert parallelism can't be
        assert (choice.training.precision, choice.training.compiled) == ("bf16", compiled)
        assert choice.memory.total <= device


def test_what_it_writes_is_its_own_model(recipe):
    same = [each.name for each in RECIPES if each.registration == recipe.registration]
    assert same == [recipe.name] or set(same) == {"stdlib-code", "stdlib-code-long"}
