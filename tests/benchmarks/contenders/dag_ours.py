"""A whole pipeline, less the lives of its stages' jobs and processes."""

import itertools
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import httpx
import psutil

from pipelines.core.settings import Settings
from pipelines.platform import dag_runs
from pipelines.recipe.recipe_files import load_recipe
from pipelines.run.records import stage_names
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.local_platform import connect, seconds_of_run

_LOOK_S = 0.05
_YOUNG_S = 1.0


class StageProcesses(Thread):
    """Watches for the children of Airflow's tasks that run stages, and how long each lives."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds: dict[str, float] = {}
        self._over = Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        known, live = set(psutil.pids()), dict[psutil.Process, str]()
        while not self._over.wait(_LOOK_S):
            for pid in set(psutil.pids()) - known:
                if (found := _stage_of(pid)) is not None:
                    live[found[0]] = found[1]
                # A process that was just forked has its parent's command still.
                if found is not None or not _is_young(pid):
                    known.add(pid)
            for process in [each for each in live if not each.is_running()]:
                self.seconds[live.pop(process)] = time.time() - process.create_time()


def _stage_of(pid: int) -> tuple[psutil.Process, str] | None:
    """`python -m pipelines.stages register`."""
    try:
        process = psutil.Process(pid)
        match process.cmdline():
            case [_, "-m", "pipelines.stages", stage, *_]:
                return process, stage
    except psutil.Error:  # it was short
        pass
    return None


def _is_young(pid: int) -> bool:
    try:
        return time.time() - psutil.Process(pid).create_time() < _YOUNG_S
    except psutil.Error:  # it is gone
        return False


def seconds_of_jobs(settings: Settings, run_id: str) -> dict[str, float]:
    """By stage, how long its Ray job lasted, as Ray has it."""
    token = settings.ray_token_path.read_text(encoding="utf-8").strip()
    url = f"{settings.ray_url}/api/jobs/"
    found = httpx.get(url, headers={"Authorization": f"Bearer {token}"}).raise_for_status().json()
    return {
        job["metadata"]["task_id"]: (job["end_time"] - job["start_time"]) / 1000
        for job in found
        if job["metadata"].get("dag_run_id") == run_id
    }


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    settings, airflow = connect(dag_runs.DAG)
    numbers = itertools.count(60)

    def run_round() -> tuple[float, dict[str, Any]]:
        recipe = load_recipe(
            str(folder / "recipe.yaml"),
            [f"data.source.max_documents={next(numbers)}"],
        )
        with StageProcesses() as stages:
            run_id = dag_runs.start(airflow, recipe)
            whole = seconds_of_run(airflow, dag_runs.DAG, run_id)
        lasted = stages.seconds | seconds_of_jobs(settings, run_id)
        if missing := set(stage_names()) - set(lasted):
            raise SystemExit(f"nothing ran {missing}")
        compute = sum(lasted.values())
        return 1.0, {"seconds": whole - compute, "whole": whole, "compute": compute}

    return run_round


if __name__ == "__main__":
    serve(prepare)
