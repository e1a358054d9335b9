"""`penstock recipes check` in a team's project, where no platform is up."""

import os
import subprocess

import pytest

from tests.conftest import PENSTOCK


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
