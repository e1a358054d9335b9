"""The site's command is run before a run trains and after it; Airflow's part is seen in e2e."""

import json
import os
import re
import subprocess
import sys

import pytest

from pipelines.core.settings import PROJECT
from pipelines.orchestration.jobs_api import ray_address
from pipelines.orchestration.temporary_nodes import NodesOperator
from pipelines.recipe.recipe_files import dump_yaml, load_recipe

# Each call is a line; `up` fails where the folder says so.
COMMAND = """#!/bin/sh
echo "$1 $PENSTOCK_RUN $PENSTOCK_WORKERS" >> calls
echo "http://127.0.0.1:1" > "$PENSTOCK_RAY_ADDRESS_FILE"
[ "$1" != up ] || [ ! -e broken ]
"""
TASKS = """
import importlib, json, sys
from airflow.sdk import DAG
module = importlib.import_module(f"dags.{sys.argv[1]}")
dag = module.prepare.dag
print(json.dumps({task.task_id: sorted(task.upstream_task_ids) for task in dag.tasks}))
"""


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    command = tmp_path / "a site's command"
    command.write_text(COMMAND)
    command.chmod(0o755)
    monkeypatch.setenv("PENSTOCK_NODES", f'"{command}"')
    workspace = tmp_path / "run-1"
    workspace.mkdir()
    recipe = load_recipe("debug", ["resources.workers=[1, 3]"])
    (workspace / "params.yaml").write_text(dump_yaml(recipe))
    return workspace


def calls(workspace) -> list[str]:
    return (workspace / "calls").read_text().splitlines()


def run(action, workspace):
    NodesOperator(task_id="nodes", action=action, workspace=str(workspace)).execute({})


def test_the_command_knows_the_run_and_its_workers(workspace):
    run("up", workspace)
    run("down", workspace)
    assert calls(workspace) == ["up run-1 3", "down run-1 3"]


def test_what_came_up_in_part_goes_at_once(workspace):
    (workspace / "broken").touch()
    with pytest.raises(RuntimeError, match=r"up exited with code 1"):
        run("up", workspace)
    assert calls(workspace) == ["up run-1 3", "down run-1 3"]


def test_jobs_go_to_the_clusters_address_while_it_is_up(workspace):
    platform = ray_address(None)
    assert ray_address(workspace) == platform
    run("up", workspace)
    assert ray_address(workspace) == "http://127.0.0.1:1"
    run("down", workspace)
    assert ray_address(workspace) == platform


@pytest.mark.parametrize("said", ["", "head:8443", "https://", "http://head:port"])
def test_what_is_no_address_is_refused_and_what_came_up_goes(workspace, monkeypatch, said):
    command = workspace.parent / "command"
    command.write_text(f'#!/bin/sh\necho "$1" >> calls\necho "{said}" > ray-address\n')
    command.chmod(0o755)
    monkeypatch.setenv("PENSTOCK_NODES", str(command))
    with pytest.raises(RuntimeError, match=re.escape(f"ray-address: '{said}' is not an address")):
        run("up", workspace)
    assert calls(workspace) == ["up", "down"]
    assert not (workspace / "ray-address").exists()


@pytest.mark.parametrize(
    ("dag", "first", "last"),
    [("llm_pipeline", "train", "evaluate"), ("llm_sweep", "member.prepare", "member.evaluate")],
)
def test_only_training_has_the_nodes(dag, first, last, tmp_path):
    tasks = tasks_of(dag, tmp_path, "site-command")
    assert tasks["nodes_up"] == ["validate"]
    assert "nodes_up" in tasks[first]
    assert tasks["nodes_down"] == sorted([last, "nodes_up"])
    assert not {"nodes_up", "nodes_down"} & set(tasks_of(dag, tmp_path, ""))


def tasks_of(dag, home, command) -> dict[str, list[str]]:
    """A DAG's tasks, each with those before it."""
    done = subprocess.run(
        [sys.executable, "-c", TASKS, dag],
        cwd=PROJECT,
        env=os.environ | {"PENSTOCK_NODES": command, "PENSTOCK_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
