"""Each recipe of a project is a DAG, as the DAG files make them in a process of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.product import DAGS, PRODUCT

# What Airflow's DAG processor does with a file, and then with the folder of broken recipes.
PARSE = """
import json, sys, time
from airflow.dag_processing.dagbag import DagBag
condition = lambda dag: getattr(dag.timetable, "asset_condition", None)
began = time.process_time()
bag = DagBag(sys.argv[1])
seconds = time.process_time() - began
print(json.dumps({
    "seconds": seconds,
    "errors": {name: text.splitlines()[-1] for name, text in bag.import_errors.items()},
    "dags": {dag.dag_id: {
        "cron": getattr(getattr(dag.timetable, "timetable", dag.timetable), "expression", None),
        "assets": [a.name for a in getattr(condition(dag), "objects", [])],
        "tags": sorted(dag.tags),
        "owner": dag.owner,
        "paused": dag.is_paused_upon_creation,
        "description": dag.description,
        "deadline": str(dag.deadline[0].interval) if dag.deadline else None,
        "weights": sorted({task.priority_weight for task in dag.tasks}),
        "tasks": [task.task_id for task in dag.topological_sort()],
        "recipe": dag.params.dump()["recipe"],
        "choices": dag.params.get_param("recipe").schema["enum"],
        "lr": dag.params.get_param("train.lr").description,
    } for dag in bag.dags.values()},
}))
"""
RECIPE = """name: {name}
description: For a test.
model: {{preset: llama-1m}}
train: {{lr: 1.0e-3}}
schedule: {schedule}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("[tool.penstock]\n")
    (tmp_path / "recipes").mkdir()
    return tmp_path


def write(project: Path, name: str, schedule: str = "{}") -> Path:
    path = project / "recipes" / f"{name}.yaml"
    path.write_text(RECIPE.format(name=name, schedule=schedule))
    return path


def parsed(project: Path, file: str = "llm_pipeline.py", folder: Path = DAGS) -> dict:
    environment = {
        "PENSTOCK_PROJECT": str(project),
        "PENSTOCK_HOME": str(project / "home"),
        "AIRFLOW_HOME": str(project / "airflow"),
        "PYTHONPATH": str(PRODUCT),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [sys.executable, "-c", PARSE, str(folder / file)],
        env=environment,
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_recipe_is_a_dag_that_runs_when_and_for_whom_it_says(project):
    write(
        project,
        "nightly",
        '{cron: "30 3 * * *", timezone: Europe/Berlin, dataset: corpus, model: base@champion, '
        "owner: ada, tags: [team-a], priority: 7, paused: true, deadline_hours: 12}",
    )
    write(project, "by-hand")
    found = parsed(project)
    assert not found["errors"]
    assert set(found["dags"]) == {"llm_pipeline", "nightly", "by-hand"}
    dag = found["dags"]["nightly"]
    assert dag["assets"] == ["dataset/corpus", "model/base@champion"]
    assert dag["cron"] == "30 3 * * *"
    assert (dag["owner"], dag["tags"], dag["paused"]) == ("ada", ["penstock", "team-a"], True)
    assert (dag["weights"], dag["deadline"]) == ([7], "12:00:00")
    assert (dag["recipe"], dag["choices"]) == ("nightly", ["nightly"])
    assert dag["lr"].endswith("Empty: 0.001")
    assert dag["tasks"] == found["dags"]["llm_pipeline"]["tasks"]
    assert found["dags"]["by-hand"]["cron"] is None
    by_hand = found["dags"]["llm_pipeline"]
    assert {"nightly", "by-hand", "stdlib-code"} <= set(by_hand["choices"])


def test_new_data_are_looked_for_when_the_recipe_says(project):
    write(project, "fresh", '{refresh: "0 2 * * *", owner: ada}')
    write(project, "still")
    found = parsed(project, "data_refresh.py")
    assert set(found["dags"]) == {"data_refresh", "fresh.refresh"}
    dag = found["dags"]["fresh.refresh"]
    assert (dag["cron"], dag["owner"]) == ("0 2 * * *", "ada")
    assert dag["tasks"] == ["prepare", "preprocess", "validate", "publish"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: bad\ntrain:\n  steps: 5\n  lr: fast\n", "recipes/bad.yaml:4: train.lr = 'fast'"),
        ("name: bad\nschedule:\n  cron: daily\n", "recipes/bad.yaml:3: schedule.cron = 'daily'"),
        ("name: bad\nschedule: {cron: '99 0 * * *'}\n", "recipes/bad.yaml: schedule.cron = '99 0"),
        ("name: other\n", "recipes/bad.yaml: name = 'other', but the file is bad.yaml"),
        ("name: [\n", "recipes/bad.yaml: not valid YAML"),
    ],
)
def test_a_broken_recipe_is_one_import_error_and_the_others_go_on(project, text, line):
    write(project, "good")
    broken = project / "recipes" / "bad.yaml"
    broken.write_text(text)
    found = parsed(project)
    assert (set(found["dags"]), found["errors"]) == ({"llm_pipeline", "good"}, {})
    folder = project / "home" / "airflow" / "broken-recipes"
    (error,) = parsed(project, "", folder)["errors"].values()
    assert line in error
    broken.unlink()
    parsed(project)
    assert list(folder.glob("*.py")) == []


def test_a_recipe_may_not_have_the_name_of_a_dag_of_ours(project):
    write(project, "llm_sweep")
    assert set(parsed(project)["dags"]) == {"llm_pipeline"}
    (error,) = (project / "home" / "airflow" / "broken-recipes").iterdir()
    assert "a DAG of Penstock has the name llm_sweep" in error.read_text()


def test_two_hundred_recipes_cost_at_most_a_second_more_than_one(project):
    write(project, "r0", '{cron: "0 3 * * *", dataset: d}')
    one = parsed(project)["seconds"]
    for number in range(1, 200):
        write(project, f"r{number}", '{cron: "0 3 * * *", dataset: d}')
    many = parsed(project)
    assert len(many["dags"]) == 201
    assert many["seconds"] - one <= 1.0


def test_a_recipe_that_is_gone_keeps_its_dag_while_a_run_of_it_goes_on(project):
    write(project, "mine", '{cron: "0 3 * * *"}').unlink()
    note = """
from pathlib import Path
from pipelines.orchestration.naming import forget_running, note_running
from pipelines.recipe.recipe_files import dump_yaml, parse_recipe
workspace = Path("mine__run-1")
workspace.mkdir(exist_ok=True)
(workspace / "params.yaml").write_text(dump_yaml(parse_recipe({"name": "mine"})))
"""
    run(project, note + "note_running(workspace, 'mine')")
    dag = parsed(project)["dags"]["mine"]
    assert (dag["cron"], dag["tags"]) == (None, ["deleted", "penstock"])
    assert "the run that had begun goes on" in dag["description"]
    run(project, note + "forget_running(workspace)")
    assert set(parsed(project)["dags"]) == {"llm_pipeline"}


def run(project: Path, code: str) -> None:
    variables = {"PENSTOCK_PROJECT": str(project), "PENSTOCK_HOME": str(project / "home")}
    subprocess.run(
        [sys.executable, "-c", code],
        env=variables | {"PYTHONPATH": str(PRODUCT), "PATH": "/usr/bin:/bin"},
        cwd=project,
        check=True,
    )
