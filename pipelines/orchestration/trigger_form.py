"""The Airflow trigger form, drawn from the recipe's own models.

Airflow draws no `anyOf` and submits every field, so each leaf is one nullable field under its
dotted name, and empty means "as the recipe says".

What the first task of each DAG does alike: which recipe is asked for, and how a mistake ends.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.sdk import Param
from airflow.sdk.exceptions import AirflowFailException

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.settings import DEFAULT_RECIPE, PROJECT, load_settings
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import (
    RESOLVED,
    leaves,
    load_recipe,
    override_values,
    parse_overrides,
    parse_recipe,
    shipped_recipes,
    with_absolute_paths,
)
from pipelines.run.workspace import workspace_path
from pipelines.stages.stage_process import keep_error

if TYPE_CHECKING:
    from airflow.sdk import Context

    from pipelines.recipe.recipe import Recipe

_KEPT = ("type", "enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def trigger_form() -> dict[str, Param]:
    """The DAG's params: the recipe, its most used leaves, and `set` for all others."""
    form = {
        "recipe": Param(
            DEFAULT_RECIPE,
            type="string",
            enum=shipped_recipes(),
            section="Recipe",
            description="What is run; every empty field below is as this recipe says.",
        )
    }
    schema = Recipe.model_json_schema(by_alias=True)
    for leaf in leaves():
        if leaf.in_trigger_form:
            section = leaf.key.partition(".")[0] if "." in leaf.key else "run"
            form[leaf.key] = Param(
                None,
                title=leaf.key,
                section=section.capitalize(),
                description=leaf.field.description or "",
                **_nullable(_leaf_schema(schema, leaf.key)),
            )
    form["set"] = Param(
        None,
        type=["string", "null"],
        format="multiline",
        section="Other values",
        description="Any other key of the recipe, one a line: `train.weight_decay=0.05`",
    )
    return form


def recipe_from(params: Mapping[str, Any], conf: Mapping[str, Any]) -> Recipe:
    """The recipe that a DAG run asks for; raises UserError with one line."""
    if RESOLVED in conf:
        return parse_recipe(conf[RESOLVED], where="conf")
    keys = [leaf.key for leaf in leaves() if leaf.in_trigger_form]
    filled = {key: params[key] for key in keys if params.get(key) is not None}
    return override_values(
        load_recipe(params["recipe"]), filled | parse_overrides(params.get("set") or "")
    )


def _leaf_schema(schema: dict[str, Any], key: str) -> dict[str, Any]:
    value = schema
    for part in key.split("."):
        value = value["properties"][part]
        if "$ref" in value:
            value = schema["$defs"][value["$ref"].rpartition("/")[2]]
    return value


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    branches = schema.get("anyOf", [schema])
    branch = next(branch for branch in branches if branch.get("type") != "null")
    kept = {key: branch[key] for key in _KEPT if key in branch}
    kept["type"] = [kept["type"], "null"]
    if "enum" in kept:
        kept["enum"] = [*kept["enum"], None]
    return kept


# A template and no XComArg: the graph shows a chain, not an edge from `prepare` to every stage.
PREPARED = "{{ ti.xcom_pull(task_ids='prepare') }}"


def asked_recipe(context: "Context") -> "Recipe":
    """The recipe of the trigger form or of `conf`; raises UserError with one line."""
    conf: Mapping[str, Any] = context["dag_run"].conf or {}
    return with_absolute_paths(recipe_from(context["params"], conf), PROJECT)


@contextmanager
def mistakes_fail_the_task(task_id: str, run_id: str) -> Iterator[None]:
    """A user's error fails the task at once, as a retry would not fix it; an outage may pass.

    Its line is kept in the run's workspace, where the stages keep theirs.
    """
    try:
        yield
    except UserError as error:
        keep_error(workspace_path(load_settings().runs, run_id), task_id, error)
        if isinstance(error, UnreachableError):
            raise
        raise AirflowFailException(str(error)) from None
