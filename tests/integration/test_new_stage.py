"""A team's own stage: one folder, one paragraph in dvc.yaml, one line in a DAG."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.recipe.recipe_files import load_recipe
from pipelines.run.records import record_path
from pipelines.stage_cache.open_workspace import open_workspace
from pipelines.stages.stage_process import stage_environment
from tests.project_copy import copy_project

FOLDER = '''
"""count_words: how many words the recipe's name has."""

from pipelines.core.storage import write_json
from pipelines.run.records import record_path
from pipelines.stages.stage import Stage

STAGE = Stage(
    name="count_words",
    does="Count the words of the recipe's name.",
    inputs=(),
    run="pipelines.stages.count_words:run",
)

def run(recipe, workspace):
    write_json(record_path(workspace, STAGE.name), {"words": len(recipe.name.split("-"))})
'''
PARAGRAPH = """  count_words:
    cmd: python -m pipelines.stages count_words
    params: [params.yaml: [name], code.json: [count_words]]
    outs: [outputs/count_words]
    meta: {code: ["pipelines.stages.count_words:run"]}
plots:
"""
LINE = """
from airflow.sdk import DAG
from pipelines.orchestration.stage_task import stage_task

with DAG("words"):
    task = stage_task("count_words")
print(type(task).__name__, task.stage, task.doc_md)
"""
RECORD = """
from pathlib import Path
from pipelines.stages.recording import {0}
print({0}(Path(), "count_words"))
"""


def python(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=stage_environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "a project"
    copy_project(folder)
    package = folder / "pipelines/stages/count_words"
    package.mkdir()
    (package / "__init__.py").write_text(FOLDER)
    text = (folder / "dvc.yaml").read_text()
    (folder / "dvc.yaml").write_text(text.replace("plots:\n", PARAGRAPH))
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    for command in (["init"], ["add", "--all"], ["commit", "--message", "copy"]):
        subprocess.run(["git", "-C", folder, *identity, *command], check=True, capture_output=True)
    return folder


def test_it_runs_is_cached_and_is_a_task(project: Path, tmp_path: Path) -> None:
    assert len(FOLDER.splitlines()) <= 20
    assert python(project, "-c", LINE) == (
        "StageOperator count_words Count the words of the recipe's name."
    )
    recipe, home = load_recipe("debug"), tmp_path / "home"
    first = open_workspace(project, home, "first", recipe, {})
    assert python(first, "-c", RECORD.format("restore")).endswith("False")
    python(first, "-m", "pipelines.stages", "count_words")
    python(first, "-c", RECORD.format("record"))
    second = open_workspace(project, home, "second", recipe, {})
    assert python(second, "-c", RECORD.format("restore")).endswith("True")
    records = [record_path(each, "count_words").read_bytes() for each in (first, second)]
    assert records[0] == records[1]
