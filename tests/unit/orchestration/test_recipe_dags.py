"""Each recipe of a project is a DAG, as the DAG files make them in a process of their own."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipelines.core.product import DAGS, PRODUCT
from tests.processor_time import limit

# What Airflow's DAG processor does with a file, and then with the folder of broken recipes.
PARSE = """
import json, sys, time
from datetime import UTC, datetime
from airflow.dag_processing.dagbag import DagBag
from airflow.serialization.encoders import coerce_to_core_timetable
from airflow.timetables.base import TimeRestriction
whenever = TimeRestriction(earliest=None, latest=None, catchup=False)
def due(dag):
    next = coerce_to_core_timetable(dag.timetable).next_dagrun_info(
        last_automated_data_interval=None, restriction=whenever)
    return bool(next) and next.run_after <= datetime.now(UTC)
condition = lambda dag: getattr(dag.timetable, "asset_condition", None)
began = time.process_time()
bag = DagBag(sys.argv[1])
seconds = time.process_time() - began
print(json.dumps({
    "seconds": seconds,
    "errors": {name: text.splitlines()[-1] for name, text in bag.import_errors.items()},
    "dags": {dag.dag_id: {
        "cron": getattr(getattr(dag.timetable, "timetable", dag.timetable), "expression", None),
        "due": due(dag),
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


def test_a_time_that_came_while_the_recipe_waited_to_be_read_is_run_and_no_older_one(project):
    now, before = (datetime.now(UTC) - timedelta(minutes=minutes) for minutes in (0, 10))
    for name, at in {"new": now, "old": before}.items():
        write(project, name, f'{{cron: "{at.minute} {at.hour} * * *"}}')
    write(project, "by-hand")
    found = parsed(project)["dags"]
    assert [found[name]["due"] for name in ("new", "old", "by-hand")] == [True, False, False]


def test_new_data_are_looked_for_when_the_recipe_says(project):
    write(project, "fresh", '{refresh: "0 2 * * *", owner: ada}')
    write(project, "still")
    found = parsed(project, "data_refresh.py")
    assert set(found["dags"]) == {"data_refresh", "fresh.refresh"}
    dag = found["dags"]["fresh.refresh"]
    assert (dag["cron"], dag["owner"]) == ("0 2 * * *", "ada")
    assert dag["tasks"] == ["prepare", "preprocess", "validate", "publish"]


BROKEN = {
    "type.yaml": (
        "name: type\ntrain:\n  steps: 5\n  lr: fast\n",
        "recipes/type.yaml:4: train.lr = 'fast'",
    ),
    "daily.yaml": (
        "name: daily\nschedule:\n  cron: daily\n",
        "recipes/daily.yaml:3: schedule.cron = 'daily': not a cron expression",
    ),
    "minute.yaml": (
        "name: minute\nschedule: {cron: '99 0 * * *'}\n",
        "recipes/minute.yaml:2: schedule.cron = '99 0 * * *': [99 0 * * *] is not acceptable",
    ),
    "refresh.yaml": (
        "name: refresh\nschedule:\n  owner: ada\n  refresh: 99 0 * * *\n",
        "recipes/refresh.yaml:4: schedule.refresh = '99 0 * * *': [99 0 * * *] is not acceptable",
    ),
    "never.yaml": (
        "name: never\nschedule: {cron: 0 0 30 2 *}\n",
        "recipes/never.yaml:2: schedule.cron = '0 0 30 2 *': failed to find next date",
    ),
    "bad.yaml": (
        "description: Of a copy\nname: other\n",
        "recipes/bad.yaml:2: name = 'other', but the file is bad.yaml",
    ),
    "llm_sweep.yaml": (
        "name: llm_sweep\n",
        "recipes/llm_sweep.yaml:1: name = 'llm_sweep': a DAG of Penstock has this name",
    ),
    "good.refresh.yaml": (
        "name: good.refresh\n",
        "recipes/good.refresh.yaml:1: name = 'good.refresh': so the DAG is called that looks for",
    ),
    "tags.yaml": (
        f"name: tags\nschedule: {{tags: [{'x' * 101}]}}\n",
        "recipes/tags.yaml:2: schedule.tags = ",
    ),
    "late.yaml": (
        "name: late\nschedule: {deadline_hours: 1.0e+12}\n",
        "recipes/late.yaml:2: schedule.deadline_hours = ",
    ),
    "no..data.yaml": (
        "name: no..data\nschedule: {refresh: '@daily'}\n",
        "recipes/no..data.yaml:2: schedule: refresh publishes a dataset, and 'no..data' can't be",
    ),
    "list.yaml": ("name: [\n", "recipes/list.yaml: not valid YAML"),
    "date.yaml": (
        "name: 2026-13-45\n",
        "recipes/date.yaml: not valid YAML: a value is none of its type: month must be in",
    ),
    "short.yml": ("name: short\n", "recipes/short.yml: a recipe's file ends in .yaml; rename it"),
}


def test_a_broken_recipe_is_one_import_error_and_the_others_go_on(project):
    good = write(project, "good", '{refresh: "0 2 * * *", dataset: my_data}')
    told = f"For a test. {'See it. ' * 40}See README.md"
    good.write_text(good.read_text().replace("For a test.", told))
    for name, (text, _) in BROKEN.items():
        (project / "recipes" / name).write_text(text)
    found = parsed(project)
    assert (set(found["dags"]), found["errors"]) == ({"llm_pipeline", "good"}, {})
    refreshes = parsed(project, "data_refresh.py")
    assert (set(refreshes["dags"]), refreshes["errors"]) == ({"data_refresh", "good.refresh"}, {})
    folder = project / "home" / "airflow" / "broken-recipes"
    errors = parsed(project, "", folder)["errors"]
    assert len(errors) == len(BROKEN)
    for name, (_, line) in BROKEN.items():
        (error,) = (each for file, each in errors.items() if Path(file).stem == Path(name).stem)
        assert line in error
        (project / "recipes" / name).unlink()
    parsed(project)
    assert list(folder.glob("*.py")) == []


SCHEDULE = '{cron: "0 3 * * *", dataset: d, refresh: "0 2 * * *"}'


@pytest.mark.long
@pytest.mark.parametrize("file", ["llm_pipeline.py", "data_refresh.py"])
def test_two_hundred_recipes_cost_at_most_a_second_more_than_one(project, file):
    write(project, "r0", SCHEDULE)
    one = min(parsed(project, file)["seconds"] for _ in range(3))
    for number in range(1, 200):
        write(project, f"r{number}", SCHEDULE)
    many = [parsed(project, file) for _ in range(3)]
    assert [len(each["dags"]) for each in many] == [201] * 3
    # The least of three: on a busy machine the same work takes the processor half as long again.
    assert min(each["seconds"] for each in many) - one <= limit(1.0)


NOTE = "from pipelines.orchestration.naming import note_live; note_live({})"


def test_a_recipe_that_is_gone_keeps_its_dags_until_its_runs_are_over(project):
    gone = write(project, "mine", '{cron: "0 3 * * *", refresh: "0 2 * * *"}')
    live = {"mine": "llm_pipeline", "mine.refresh": "data_refresh"}
    run(project, NOTE.format(live))
    assert parsed(project)["dags"]["mine"]["cron"] == "0 3 * * *"
    gone.unlink()
    for dag_id, file in live.items():
        dag = parsed(project, f"{file}.py")["dags"][dag_id]
        assert (dag["cron"], dag["tags"]) == (None, ["deleted", "penstock"])
        assert "a run that had begun goes on" in dag["description"]
    run(project, NOTE.format({}))
    for file in live.values():
        assert set(parsed(project, f"{file}.py")["dags"]) == {file}


def run(project: Path, code: str) -> None:
    variables = {"PENSTOCK_PROJECT": str(project), "PENSTOCK_HOME": str(project / "home")}
    subprocess.run(
        [sys.executable, "-c", code],
        env=variables | {"PYTHONPATH": str(PRODUCT), "PATH": "/usr/bin:/bin"},
        cwd=project,
        check=True,
    )
