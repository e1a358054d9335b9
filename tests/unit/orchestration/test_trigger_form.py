"""The trigger form says what the recipe says."""

import pytest
from airflow.sdk.definitions._internal.dag_parsing_context import _airflow_parsing_context_manager
from airflow.sdk.exceptions import ParamValidationError

from pipelines.core.errors import UserError
from pipelines.orchestration import trigger_form as form
from pipelines.orchestration.recipe_dags import recipe_dags
from pipelines.orchestration.trigger_form import recipe_from, trigger_form
from pipelines.recipe.recipe_files import RESOLVED, load_recipe
from pipelines.recipe.schedule_section import MAIN_DAG
from pipelines.run.workspace import Run, read_recipe
from pipelines.stage_cache.open_workspace import open_workspace, project_state
from tests.unit.stage_cache.cached_project import git, make_project

UNTOUCHED = {name: param.value for name, param in trigger_form().items()}


def test_every_field_is_valid_when_untouched():
    for param in trigger_form().values():
        param.resolve()


@pytest.mark.parametrize(("task", "makes"), [(None, True), ("prepare", True), ("train", False)])
def test_the_stages_tasks_which_have_the_runs_recipe_make_no_form(task, makes):
    with _airflow_parsing_context_manager(dag_id=MAIN_DAG, task_id=task):
        (dag,) = recipe_dags(None)
    assert bool(dag.params) is makes


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


def test_a_recipe_changed_in_git_is_what_the_next_run_uses(tmp_path, monkeypatch):
    project = make_project(tmp_path)
    monkeypatch.setattr(form, "PROJECT", project)
    file = project / "recipes" / "mine.yaml"
    file.parent.mkdir()

    def run_after_commit(run_id, steps):
        file.write_text(f"name: mine\ntrain: {{steps: {steps}, warmup_steps: 0}}\n")
        git(project, "add", "--all")
        git(project, "commit", "--quiet", "--message", run_id)
        recipe = recipe_from({**UNTOUCHED, "recipe": "mine"}, {}, "mine")
        return open_workspace(project, tmp_path / "home", run_id, recipe, {}), project_state(
            project
        )

    (first, before), (second, after) = run_after_commit("one", 5), run_after_commit("two", 7)
    assert before[0] != after[0]
    for workspace, (commit, _), steps in ((first, before, 5), (second, after, 7)):
        assert (Run.read(workspace).git_commit, Run.read(workspace).dirty) == (commit, False)
        assert read_recipe(workspace).train.steps == steps
        assert f"steps: {steps}" in (workspace / "recipes" / "mine.yaml").read_text()


@pytest.mark.parametrize("dag_id", ["debug", "debug.refresh"])
def test_the_dag_of_a_recipe_that_was_deleted_runs_none_of_the_same_name(
    tmp_path, monkeypatch, dag_id
):
    monkeypatch.setattr(form, "PROJECT", tmp_path)
    with pytest.raises(UserError, match=r"^recipe file recipes/debug\.yaml does not exist"):
        recipe_from({**UNTOUCHED, "recipe": "debug"}, {}, dag_id)
