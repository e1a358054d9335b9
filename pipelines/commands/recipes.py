"""`penstock recipes list | show | check | schema`."""

import json

import typer

from pipelines.commands.options import Json, Overrides
from pipelines.core.errors import EXIT_USER_ERROR, UserError

app = typer.Typer(help="Show and check recipes.", no_args_is_help=True)


@app.command("list")
def list_recipes(as_json: Json = False) -> None:
    """List the project's recipes, then those that come with Penstock, and their purpose."""
    from pipelines.recipe.recipe_files import known_recipes, load_recipe

    recipes = {name: load_recipe(name).description for name in known_recipes()}
    if as_json:
        typer.echo(json.dumps(recipes, indent=2))
        return
    width = max(map(len, recipes))
    for name, description in recipes.items():
        typer.echo(f"{name:<{width}}  {description}")


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
    from pipelines.core.settings import PROJECT
    from pipelines.recipe.recipe_files import (
        load_recipe,
        project_recipes,
        with_absolute_paths,
    )
    from pipelines.registry.parents import Settled, with_own_tokenizer
    from pipelines.stages.beforehand import ALONE, check_beforehand

    wrong = 0
    for path in project_recipes():
        try:
            recipe = with_absolute_paths(load_recipe(path), PROJECT)
            check_beforehand(Settled(recipe, with_own_tokenizer(recipe), {}), ALONE)
        except UserError as error:
            typer.echo(f"error: {error}", err=True)
            wrong += 1
        else:
            typer.echo(f"ok     {path.stem}")
    if wrong:
        raise typer.Exit(EXIT_USER_ERROR)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, for completion and help in editors."""
    from pipelines.recipe.recipe_files import schema_text

    typer.echo(schema_text().rstrip())
