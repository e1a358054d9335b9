"""The Airflow trigger form, made from the recipe's own models.

Airflow cannot draw `anyOf` and submits every field, so each leaf is one nullable field under its
dotted name, and an empty field means the recipe's value.

The first task of each DAG shares the rest: reading the requested recipe, and failing on mistakes.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from airflow.sdk import Param
from airflow.sdk.exceptions import AirflowFailException

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.product import recipes_folder
from pipelines.core.settings import DEFAULT_RECIPE, PROJECT, load_settings
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import (
    RESOLVED,
    Leaf,
    get_dotted,
    known_recipes,
    leaves,
    load_own_recipe,
    load_recipe,
    override_values,
    parse_overrides,
    parse_recipe,
    with_absolute_paths,
)
from pipelines.recipe.schedule_section import MAIN_DAG, REFRESH
from pipelines.run.workspace import workspace_path
from pipelines.stages.stage_process import keep_error

if TYPE_CHECKING:
    from airflow.sdk import Context

    from pipelines.recipe.recipe import Recipe

_log = logging.getLogger(__name__)
_KEPT = ("type", "enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def trigger_form(recipe: Recipe | None = None) -> dict[str, Param]:
    """Return the DAG's params: the recipe, its most used leaves, and `set` for all others.

    Args:
        recipe: The only recipe that the DAG runs, whose values the form shows; None: any recipe.
    """
    names = [recipe.name] if recipe else known_recipes()
    form = {
        "recipe": Param(
            recipe.name if recipe else DEFAULT_RECIPE,
            type="string",
            enum=names,
            section="Recipe",
            description="The recipe to run; an empty field below keeps this recipe's value.",
        )
    }
    values = recipe.to_dict() if recipe else {}
    for leaf, schema in _fields():
        section = leaf.key.partition(".")[0] if "." in leaf.key else "run"
        form[leaf.key] = Param(
            None,
            title=leaf.key,
            section=section.capitalize(),
            description=_described(leaf, values),
            **schema,
        )
    form["set"] = Param(
        None,
        type=["string", "null"],
        format="multiline",
        section="Other values",
        description="Other keys of the recipe, one per line: `train.weight_decay=0.05`",
    )
    return form


def recipe_from(
    params: Mapping[str, Any], conf: Mapping[str, Any], dag_id: str = MAIN_DAG
) -> Recipe:
    """Return the recipe that a DAG run requests; raise UserError with one line."""
    if RESOLVED in conf:
        return parse_recipe(conf[RESOLVED], where="conf")
    name = params["recipe"]
    # A recipe's own DAG never runs one of the same name that comes with Penstock.
    is_own = dag_id.removesuffix(REFRESH) == name
    file = recipes_folder(PROJECT) / f"{name}.yaml"
    recipe = load_own_recipe(file) if is_own else load_recipe(name)
    keys = [leaf.key for leaf, _ in _fields()]
    filled = {key: params[key] for key in keys if params.get(key) is not None}
    return override_values(recipe, filled | parse_overrides(params.get("set") or ""))


@cache  # the same for each of a project's recipes
def _fields() -> list[tuple[Leaf, dict[str, Any]]]:
    """Return the leaves that the form shows, each with the JSON schema of its field."""
    schema = Recipe.model_json_schema(by_alias=True)
    shown = (leaf for leaf in leaves() if leaf.in_trigger_form)
    return [(leaf, _nullable(_leaf_schema(schema, leaf.key))) for leaf in shown]


def _described(leaf: Leaf, values: dict[str, Any]) -> str:
    """Return the field's help, and the recipe's own value, which an empty field keeps."""
    text = leaf.field.description or ""
    if not values:
        return text
    value = get_dotted(values, leaf.key)
    own = "null" if value is None else value
    return f"{text.removesuffix('.')}. Empty: {own}"


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


# A template, as with an XComArg the graph shows an edge from `prepare` to every stage.
PREPARED = "{{ ti.xcom_pull(task_ids='prepare') }}"


def asked_recipe(context: "Context") -> "Recipe":
    """Return the recipe of the trigger form or of `conf`; raise UserError with one line."""
    conf: Mapping[str, Any] = context["dag_run"].conf or {}
    recipe = recipe_from(context["params"], conf, context["dag_run"].dag_id)
    return with_absolute_paths(recipe, PROJECT)


@contextmanager
def mistakes_fail_the_task(task_id: str, run_id: str) -> Iterator[None]:
    """Fail the task at once on a user's error within the block, which a retry would not fix.

    The error is kept in the run's workspace, as for stages. An outage is retried: it may pass.
    """
    try:
        yield
    except UserError as error:
        try:
            keep_error(workspace_path(load_settings().runs, run_id), task_id, error)
        except OSError as full:  # the home can't be written, which may be what is told
            _log.warning("the error is only here: %s", full)
        if isinstance(error, UnreachableError):
            raise
        raise AirflowFailException(str(error)) from None
