from math import inf

import pytest

from pipelines.core.errors import UserError
from pipelines.models.presets import preset
from pipelines.planning.layout_rule import choose, is_left_to_the_rule
from pipelines.recipe.recipe import Recipe
from tests.settled import FP32

GIB = 2**30


def recipe(**parallel: object) -> Recipe:
    train = FP32 | {"micro_batch_size": "auto", "global_batch_size": 512, "precision": "bf16"}
    data = {"sequence_length": 4096}
    values = {"name": "t", "data": data, "train": train, "parallel": parallel or "auto"}
    return Recipe.model_validate(values)


def chosen(model: str, world: int, gib: int = 80, below: float = inf):
    return choose(recipe(), preset(model), world, gib * GIB, below=below)


@pytest.mark.parametrize(
    ("model", "world", "sharding", "tp"),
    [
        ("gpt2-124m", 8, "none", 1),
        ("llama3-8b", 8, "gradients", 1),
        ("llama3-70b", 64, "full", 4),
    ],
)
def test_the_first_that_fits_is_taken(model, world, sharding, tp):
    choice = chosen(model, world)
    assert (choice.recipe.parallel.sharding, choice.layout.tp) == (sharding, tp)
    assert choice.layout.world == world
    assert choice.memory.total <= 80 * GIB
    assert not is_left_to_the_rule(choice.recipe)


def test_what_is_fixed_stays():
    choice = choose(recipe(tp=2, sharding="full"), preset("llama3-8b"), 8, 80 * GIB)
    assert (choice.layout.tp, choice.layout.dp_shard) == (2, 4)
    assert choice.recipe.parallel.sharding == "full"


def test_after_a_failure_comes_one_that_needs_less_of_the_same_batch():
    totals, batches = [inf], set()
    for _ in range(3):
        choice = chosen("llama3-8b", 8, below=totals[-1])
        totals.append(choice.memory.total)
        batches.add(choice.recipe.train.global_batch_size)
    assert totals == sorted(set(totals), reverse=True)
    assert batches == {512}


def test_nothing_fits():
    with pytest.raises(UserError, match=r"no layout of 1 processes fits 24 GiB a device"):
        chosen("llama3-70b", 1, gib=24)


def test_what_cannot_be_divided_is_passed_over():
    """GPT-2's 12 heads go over 4 processes, not over 8; a pipeline needs a micro-batch a stage."""
    for world in (8, 16):
        choice = choose(recipe(tp="auto", sharding="full"), preset("gpt2-124m"), world, 2 * GIB)
        assert choice.layout.tp in (1, 2, 4)
    sizes = FP32 | {"global_batch_size": 8, "micro_batch_size": 8}
    few = Recipe.model_validate({"name": "t", "parallel": "auto", "train": sizes})
    with pytest.raises(UserError, match="no layout of 8 processes fits"):
        choose(few, preset("llama3-8b"), 8, 8 * GIB)


def test_what_is_fixed_and_impossible_is_said():
    with pytest.raises(UserError, match=r"parallel\.tp\(8\) does not divide the model's kv_heads"):
        choose(recipe(tp=8), preset("gpt2-124m"), 8, 80 * GIB)


def test_a_recipe_without_auto_is_left_as_it_is():
    fixed = Recipe.model_validate({"name": "t", "train": FP32})
    choice = choose(fixed, preset("llama-1m").sized(100, 256), 2, GIB)
    assert choice.recipe.train == fixed.train
    assert choice.layout.dp_replicate == 2


def test_a_pipeline_gets_the_largest_micro_batch_that_gives_each_stage_one():
    values = {
        "name": "t",
        "data": {"sequence_length": 1024},
        "train": FP32 | {"micro_batch_size": "auto", "global_batch_size": 16},
        "parallel": {"pp": 4, "sharding": "full"},
    }
    choice = choose(Recipe.model_validate(values), preset("llama3-8b"), 4, 400 * GIB)
    assert choice.recipe.train.micro_batch_size == 4


def test_processes_of_one_sequence_are_sharded_over_too():
    choice = choose(recipe(cp=8, sharding="auto"), preset("llama3-8b"), 8, 80 * GIB)
    assert (choice.layout.cp, choice.layout.dp_shard) == (8, 1)
    assert choice.recipe.parallel.sharding == "gradients"
    roomy = choose(recipe(cp=8, sharding="full"), preset("llama3-8b"), 8, 800 * GIB)
    assert roomy.recipe.train.micro_batch_size == 8 * 16_384 / 4096
