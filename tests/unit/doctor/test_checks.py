"""The list of checks, and the guide to them."""

import pytest

from pipelines.core.recipe_files import load_recipe
from pipelines.core.settings import PROJECT
from pipelines.doctor.checks import node_checks, service_checks

GUIDE = (PROJECT / "docs" / "doctor.md").read_text()
RECIPE = load_recipe("debug")
NODE = [check.name for check in node_checks(RECIPE)]


def test_every_check_of_a_machine_has_its_row_in_the_guide_and_the_other_way_round():
    table = GUIDE.split("## A machine")[1].split("## Services")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert rows[2:] == NODE


@pytest.mark.parametrize("name", [check.name for check in service_checks(RECIPE)])
def test_every_service_is_in_the_guide(name):
    assert name in GUIDE.split("## Services")[1].split("## A cluster")[0]


def test_names_are_their_own():
    names = [*NODE, *(check.name for check in service_checks(RECIPE))]
    assert len(set(names)) == len(names)
