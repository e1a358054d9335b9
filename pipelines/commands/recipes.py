"""`penstock recipes list | show | check | schema`."""

import json
from pathlib import Path

import typer

from pipelines.commands.options import Json, Overrides
from pipelines.core.errors import EXIT_USER_ERROR, UserError

app = typer.Typer(help="Show and check recipes.", no_args_is_help=True)


@app.command("list")
def list_recipes(as_json: Json = False) -> None:
    """List the project's recipes, then those that come with Penstock, and their purpose.

    A recipe that cannot be read is named too, and the exit code is then 2.
    """
    from pipelines.recipe.recipe_files import load_own_recipe, recipe_files

    recipes, wrong = {}, []
    for path in recipe_files():
        try:
            recipes[path.stem] = load_own_recipe(path).description
        except UserError as error:
            wrong.append(error)
    if as_json:
        typer.echo(json.dumps(recipes, indent=2))
    else:
        width = max(map(len, recipes))
        for name, description in recipes.items():
            typer.echo(f"{name:<{width}}  {description}")
    _end_with(wrong)


@app.command()
def show(recipe: str, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the whole resolved recipe. RECIPE is a recipe's name or a YAML file."""
    from pipelines.recipe.recipe_files import dump_yaml, load_recipe

    resolved = load_recipe(recipe, overrides or [])
    text = json.dumps(resolved.to_dict(), indent=2) if as_json else dump_yaml(resolved).rstrip()
    typer.echo(text)


@app.command()
def check() -> None:
    """Check each recipe of the project, and end with exit code 2 if one is wrong.

    What only services know, such as registered models, a run checks when it begins.
    """
    from pipelines.recipe.recipe_files import project_recipes

    wrong = []
    for path in project_recipes():
        try:
            _check(path)
        except UserError as error:
            wrong.append(error)
        else:
            typer.echo(f"ok     {path.stem}")
    _end_with(wrong)


def _check(path: Path) -> None:
    from pipelines.core.settings import PROJECT
    from pipelines.recipe.recipe_files import load_own_recipe, with_absolute_paths
    from pipelines.registry.parents import Settled, with_own_tokenizer
    from pipelines.stages.beforehand import ALONE, check_beforehand

    recipe = with_absolute_paths(load_own_recipe(path), PROJECT)
    try:
        check_beforehand(Settled(recipe, with_own_tokenizer(recipe), {}), ALONE)
    except UserError as error:
        raise UserError(f"recipes/{path.name}: {error}") from None


def _end_with(wrong: list[UserError]) -> None:
    """Print the errors; end with exit code 2 if there are any."""
    for error in wrong:
        typer.echo(f"error: {error}", err=True)
    if wrong:
        raise typer.Exit(EXIT_USER_ERROR)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, for completion and help in editors."""
    from pipelines.recipe.recipe_files import schema_text

    typer.echo(schema_text().rstrip())
