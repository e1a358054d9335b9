"""The train task of a whole pipeline, from its queueing to the first step."""

import itertools
import os
from pathlib import Path
from typing import Any

from pipelines.platform import dag_runs
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_recipe
from pipelines.run.progress import ProgressReader
from pipelines.run.workspace import workspace_path
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.local_platform import connect, seconds_of, wait_for_run, wait_until


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    settings, airflow = connect(dag_runs.DAG)
    numbers = itertools.count(1)

    def next_recipe() -> Recipe:
        """One that no earlier round has trained."""
        new = f"train.lr={1e-3 + next(numbers) * 1e-9 + os.getpid() * 1e-12!r}"
        return load_recipe(str(folder / "recipe.yaml"), [new])

    def run_round() -> tuple[float, dict[str, Any]]:
        run_id = dag_runs.start(airflow, next_recipe())
        progress = ProgressReader(workspace_path(settings.runs, run_id))

        def has_stepped() -> bool:
            return any(each.stage == "train" and each.done >= 1 for each in progress.read())

        stepped = wait_until(has_stepped, "the first step")
        # Asked for now: once the job is over the task is queued again, to go on.
        queued = seconds_of(airflow.tasks(dag_runs.DAG, run_id)["train"]["queued_when"])
        wait_for_run(airflow, dag_runs.DAG, run_id)
        return 1.0, {"seconds": stepped - queued}

    return run_round


if __name__ == "__main__":
    serve(prepare)
