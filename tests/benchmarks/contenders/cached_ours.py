"""A pipeline that has run before, stage by stage."""

import itertools
import os
import statistics
from pathlib import Path
from typing import Any

from pipelines.platform import dag_runs
from pipelines.recipe.recipe_files import load_recipe
from pipelines.run.records import stage_names
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.local_platform import connect, seconds_of_run, wait_for_run

NOTHING = "nothing"  # the DAG of stock tasks


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    settings, airflow = connect(dag_runs.DAG, NOTHING)
    recipe = load_recipe(str(folder / "recipe.yaml"))
    wait_for_run(airflow, dag_runs.DAG, dag_runs.start(airflow, recipe))  # fills the cache
    numbers = itertools.count()

    def run_round() -> tuple[float, dict[str, Any]]:
        nothing = f"nothing-{os.getpid()}-{next(numbers)}"
        airflow.trigger(NOTHING, nothing, {})
        wait_for_run(airflow, NOTHING, nothing)
        durations = [each["duration"] for each in airflow.tasks(NOTHING, nothing).values()]
        stock = statistics.median(durations)
        run_id = dag_runs.start(airflow, recipe)
        whole = seconds_of_run(airflow, dag_runs.DAG, run_id)
        stages = dag_runs.summarize(airflow, settings, run_id).stages
        if fresh := [name for name in stage_names()[:-1] if not stages[name].cached]:
            raise SystemExit(f"not out of the cache: {fresh}")
        own = {name: (stages[name].seconds or 0.0) - stock for name in stage_names()}
        return 1.0, {"seconds": max(own.values()), **own, "stock task": stock, "whole": whole}

    return run_round


if __name__ == "__main__":
    serve(prepare)
