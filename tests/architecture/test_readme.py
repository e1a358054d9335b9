"""The README and the command say the same."""

import re

import pytest
import typer

from pipelines.cli import app
from pipelines.core.settings import PROJECT
from pipelines.recipe.recipe_files import shipped_recipes

README = (PROJECT / "README.md").read_text()
COMMANDS = typer.main.get_command(app).commands


def listed() -> set[str]:
    """The words of the README's list of commands, without options and placeholders."""
    listing = README.split("## Everyday commands")[1].split("\n\n")[1]
    lines = re.findall(r"^    penstock (.+?)(?:  |$)", listing, re.MULTILINE)
    return {word for line in lines for word in re.sub(r"\[.*", "", line).split() if word.islower()}


def test_the_readme_lists_exactly_the_commands_there_are():
    subcommands = {name for group in COMMANDS.values() for name in getattr(group, "commands", {})}
    assert listed() | {"env"} == {*COMMANDS, *subcommands}  # env has a paragraph of its own


@pytest.mark.parametrize(
    "path",
    re.findall(r"\]\(([^)#]+)\)", README + (PROJECT / "CONTRIBUTING.md").read_text()),
)
def test_every_link_leads_somewhere(path):
    assert (PROJECT / path).exists()


@pytest.mark.parametrize("recipe", re.findall(r"--recipe ([a-z][\w-]+)\b(?!\.)", README))
def test_every_recipe_named_is_shipped(recipe):
    assert recipe in shipped_recipes()
