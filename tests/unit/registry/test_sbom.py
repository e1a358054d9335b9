import json

import pytest

from pipelines.core.settings import PROJECT
from pipelines.registry.registration import bill_of_materials


@pytest.fixture
def bill():
    made_of = {"stdlib-code@3": "c0ffee.dir", "llama": "beef"}
    return bill_of_materials("small", "a" * 64, PROJECT / "requirements.lock", made_of, "abc123")


def test_it_is_cyclonedx_by_its_own_schema(bill):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None


def test_it_names_the_model_its_data_and_every_pinned_package(bill):
    assert bill["metadata"]["component"]["name"] == "small"
    assert bill["metadata"]["component"]["type"] == "machine-learning-model"
    of_kind = {}
    for each in bill["components"]:
        of_kind.setdefault(each["type"], {})[each["name"]] = each["version"]
    assert of_kind["data"] == {"stdlib-code@3": "c0ffee.dir", "llama": "beef"}
    lines = (PROJECT / "requirements.lock").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    assert pinned.items() <= of_kind["library"].items()
    purls = {each.get("purl") for each in bill["components"]}
    assert f"pkg:pypi/torch@{pinned['torch']}" in purls


def test_the_same_model_gives_the_same_bill(bill):
    made_of = {"stdlib-code@3": "c0ffee.dir", "llama": "beef"}
    lock = PROJECT / "requirements.lock"
    assert bill_of_materials("small", "a" * 64, lock, made_of, "abc123") == bill
