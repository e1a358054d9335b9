"""A whole pipeline, less the lives of its stages' processes."""

import itertools
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import psutil

from pipelines.core.recipe_files import load_recipe
from pipelines.core.records import STAGES
from pipelines.services import dag_run
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.local_platform import connect, seconds_of_run

_LOOK_S = 0.05


class StageProcesses(Thread):
    """Watches for the processes of stages, whoever starts them, and how long each lives."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds = dict.fromkeys(STAGES, 0.0)
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
            pids = set(psutil.pids())
            for pid in pids - known:
                if (found := _stage_of(pid)) is not None:
                    live[found[0]] = found[1]
            known = pids
            for process in [each for each in live if not each.is_running()]:
                self.seconds[live.pop(process)] += time.time() - process.create_time()


def _stage_of(pid: int) -> tuple[psutil.Process, str] | None:
    """`python -m ray_jobs.train`, or `python -m pipelines.stages register`."""
    try:
        process = psutil.Process(pid)
        match process.cmdline():
            case [_, "-m", module, *_] if module.startswith("ray_jobs."):
                return process, module.removeprefix("ray_jobs.")
            case [_, "-m", "pipelines.stages", stage, *_]:
                return process, stage
    except psutil.Error:  # it was short
        pass
    return None


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    _, airflow = connect(dag_run.DAG)
    seeds = itertools.count(1)

    def run_round() -> tuple[float, dict[str, Any]]:
        recipe = load_recipe(str(folder / "recipe.yaml"), [f"seed={next(seeds)}"])
        with StageProcesses() as stages:
            run_id = dag_run.start(airflow, recipe)
            whole = seconds_of_run(airflow, dag_run.DAG, run_id)
        if missing := [name for name, seconds in stages.seconds.items() if not seconds]:
            raise SystemExit(f"no process of {missing} was seen")
        compute = sum(stages.seconds.values())
        return 1.0, {"seconds": whole - compute, "whole": whole, "compute": compute}

    return run_round


if __name__ == "__main__":
    serve(prepare)
