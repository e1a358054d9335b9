"""The trigger form says what the recipe says."""

import pytest
from airflow.sdk.exceptions import ParamValidationError

from pipelines.core.errors import UserError
from pipelines.orchestration.trigger_form import recipe_from, trigger_form
from pipelines.recipe.recipe_files import RESOLVED, load_recipe

UNTOUCHED = {name: param.value for name, param in trigger_form().items()}


def test_every_field_is_valid_when_untouched():
    for param in trigger_form().values():
        param.resolve()


def test_an_untouched_form_of_another_recipe_runs_that_recipes_values():
    recipe = recipe_from({**UNTOUCHED, "recipe": "debug"}, {})
    assert recipe == load_recipe("debug")


def test_a_field_and_the_set_field_override_the_recipe():
    params = {
        **UNTOUCHED,
        "recipe": "debug",
        "train.steps": 7,
        "set": "train.weight_decay=0\nname=mine",
    }
    recipe = recipe_from(params, {})
    assert (recipe.train.steps, recipe.train.weight_decay, recipe.name) == (7, 0, "mine")


def test_a_whole_recipe_in_conf_wins():
    sent = load_recipe("debug", ["name=sent", "train.steps=9"])
    assert recipe_from(UNTOUCHED, {RESOLVED: sent.to_dict()}) == sent


@pytest.mark.parametrize(("field", "value"), [("train.steps", 0), ("train.precision", "fp7")])
def test_the_form_refuses_a_bad_value(field, value):
    with pytest.raises(ParamValidationError):
        trigger_form()[field].resolve(value)


def test_a_bad_key_in_the_set_field_is_one_line():
    with pytest.raises(UserError, match=r"did you mean train\.steps"):
        recipe_from({**UNTOUCHED, "set": "train.stepz=1"}, {})
