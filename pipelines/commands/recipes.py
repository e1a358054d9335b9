"""`penstock recipes list | show`."""

import json

import typer

from pipelines.commands.options import Json, Overrides

app = typer.Typer(help="The shipped recipes.", no_args_is_help=True)


@app.command("list")
def list_recipes(as_json: Json = False) -> None:
    """Name every shipped recipe and say what it is for."""
    from pipelines.recipe.recipe_files import load_recipe, shipped_recipes

    recipes = {name: load_recipe(name).description for name in shipped_recipes()}
    if as_json:
        typer.echo(json.dumps(recipes, indent=2))
        return
    width = max(map(len, recipes))
    for name, description in recipes.items():
        typer.echo(f"{name:<{width}}  {description}")


@app.command()
def show(recipe: str, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the whole resolved recipe; RECIPE is a shipped name or a YAML file."""
    from pipelines.recipe.recipe_files import dump_yaml, load_recipe

    resolved = load_recipe(recipe, overrides or [])
    text = json.dumps(resolved.to_dict(), indent=2) if as_json else dump_yaml(resolved).rstrip()
    typer.echo(text)
