"""The list of checks, and the guide to them."""

import pytest

from pipelines.core.settings import PROJECT
from pipelines.doctor.checks import node_checks, service_checks
from pipelines.recipe.recipe_files import load_recipe

GUIDE = (PROJECT / "docs" / "doctor.md").read_text()
RECIPE = load_recipe("debug")
NODE = [check.name for check in node_checks(RECIPE)]
SERVICES = [check.name for check in service_checks(RECIPE)]


@pytest.mark.parametrize(("section", "names"), [("A machine", NODE), ("Services", SERVICES)])
def test_every_check_has_its_row_in_the_guide_and_the_other_way_round(section, names):
    table = GUIDE.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert rows[2:] == names


def test_names_are_their_own():
    names = [*NODE, *SERVICES]
    assert len(set(names)) == len(names)
