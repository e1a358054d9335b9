"""`penstock report` names the pages of a run."""

import json

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.run.workspace import Run, workspace_path


def add_run(name, *pages):
    folder = workspace_path(load_settings().runs, name)
    for page in pages:
        path = folder / "outputs" / page
        path.parent.mkdir(parents=True)
        path.write_text("<html>")
    folder.mkdir(parents=True, exist_ok=True)
    Run(
        dag_run_id=name,
        git_commit="0" * 40,
        dirty=False,
        recipe_fingerprint="",
        mlflow_address="http://127.0.0.1:5000/run",
    ).write(folder)
    return folder


def told(*arguments):
    result = CliRunner().invoke(app, ["report", *arguments, "--json"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


def test_a_runs_pages_the_most_telling_first(home):
    folder = add_run("one", "validate/data_docs/index.html", "evaluate/report.html")
    assert told("one") == {
        "run": "one",
        "evaluation": str(folder / "outputs/evaluate/report.html"),
        "data gate": str(folder / "outputs/validate/data_docs/index.html"),
        "mlflow": "http://127.0.0.1:5000/run",
    }
    assert list(told("one"))[1] == "evaluation"


def test_the_newest_run_if_none_is_named(home):
    add_run("one")
    add_run("two", "register/compare.html")
    assert told()["run"] == "two"


def test_what_is_not_there_is_one_line(home):
    with pytest.raises(UserError, match=r"there is no run in .* yet; `penstock run` starts one"):
        told()
    add_run("one")
    with pytest.raises(UserError, match="there is no run 'two'"):
        told("two")
    result = CliRunner().invoke(app, ["report", "one"])
    assert "has no page yet" in str(result.exception)
