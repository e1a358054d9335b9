"""`penstock recipes`: one broken recipe hides no other, and is named."""

import json
import os
import re
import subprocess

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.core import settings
from pipelines.recipe import recipe_files
from tests.conftest import PENSTOCK


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """The folder of a project's recipes: a good one, and one with each kind of mistake."""
    for module in (settings, recipe_files):
        monkeypatch.setattr(module, "PROJECT", tmp_path)
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "good.yaml").write_text("name: good\ndescription: Is well.\n")
    (folder / "broken.yaml").write_text("name: [\n")
    (folder / "times.yaml").write_text("name: times\nschedule: {refresh: 99 0 * * *}\n")
    (folder / "copy.yaml").write_text("name: good\n")
    (folder / "data_refresh.yaml").write_text("name: data_refresh\n")
    (folder / "short.yml").write_text("name: short\n")
    return folder


MISTAKES = (
    "error: recipes/broken.yaml: not valid YAML: ",
    "error: recipes/copy.yaml:1: name = 'good', but the file is copy.yaml; ",
    "error: recipes/data_refresh.yaml:1: name = 'data_refresh': a DAG of Penstock has this name",
    "error: recipes/short.yml: a recipe's file ends in .yaml; rename it to short.yaml",
    "error: recipes/times.yaml:2: schedule.refresh = '99 0 * * *': [99 0 * * *] is not acceptable",
)


@pytest.mark.parametrize("command", ["list", "check"])
def test_a_broken_recipe_is_named_and_hides_no_other(recipes, command):
    done = CliRunner().invoke(app, ["recipes", command])
    assert done.exit_code == 2
    good = {"list": r"^good +Is well\.$", "check": r"^ok     good$"}[command]
    assert re.search(good, done.stdout, re.MULTILINE)
    lines = done.stderr.splitlines()
    assert len(lines) == len(MISTAKES)
    for line, mistake in zip(lines, MISTAKES, strict=True):
        assert line.startswith(mistake)


def test_the_list_as_json_holds_what_can_be_read(recipes):
    done = CliRunner().invoke(app, ["recipes", "list", "--json"])
    assert done.exit_code == 2
    listed = json.loads(done.stdout)
    assert listed["good"] == "Is well."
    assert {"debug", "stdlib-code"} <= set(listed)
    assert not {"broken", "copy", "short", "times"} & set(listed)


def test_what_the_engine_cannot_run_is_told_with_its_recipe(recipes):
    for path in recipes.iterdir():
        path.unlink()
    (recipes / "big.yaml").write_text("name: big\ntrain: {precision: fp8, compile: false}\n")
    done = CliRunner().invoke(app, ["recipes", "check"])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: recipes/big.yaml: train.precision = 'fp8': ")


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.penstock]\n")
    (tmp_path / "recipes").mkdir()
    return tmp_path


def check(project):
    """It reaches no service: there is none at these addresses."""
    away = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "PENSTOCK_HOME": str(project / "none")}
    return subprocess.run(
        [PENSTOCK, "recipes", "check"],
        cwd=project,
        env=os.environ | away,
        capture_output=True,
        text=True,
    )


def test_what_needs_no_service_is_refused_as_in_a_run(project, tiny_model):
    recipes = project / "recipes"
    recipes.joinpath("right.yaml").write_text("name: right\n")
    recipes.joinpath("child.yaml").write_text(
        "name: child\ndata: {tokenizer: {kind: model}, instruction: {kind: messages}}\n"
        "model: {init_from: models:/base@champion}\n"
    )
    recipes.joinpath("same.yaml").write_text(
        "name: same\ndata: {tokenizer: {kind: model}, sequence_length: 64}\n"
        f"model: {{init_from: {tiny_model}}}\n"
    )
    recipes.joinpath("country.yaml").write_text("name: country\ndata: {pii: {phone_region: XX}}\n")
    recipes.joinpath("foreign.yaml").write_text(
        f"name: foreign\ndata: {{sequence_length: 64}}\nmodel: {{init_from: {tiny_model}}}\n"
    )
    done = check(project)
    assert done.returncode == 2, done.stderr
    assert done.stdout.split() == ["ok", "child", "ok", "right", "ok", "same"]
    country, foreign = done.stderr.strip().splitlines()
    assert "no country has this code" in country
    assert "data.tokenizer.kind = 'bpe' makes a new tokenizer" in foreign
    assert not (project / "none").exists()
