"""A stage as a Ray job: `python -m ray_jobs.stage_job NAME`, from the workspace."""

import os
import sys
from functools import partial
from pathlib import Path

import ray

from pipelines.recipe.recipe import Recipe
from pipelines.run.usage import holds
from pipelines.stages.recording import record
from pipelines.stages.stage import Resources, Stage, find_stage
from pipelines.stages.stage_process import RAY_JOB_VARIABLE, run_stage
from ray_jobs.connection import connect
from ray_jobs.ray_map import map_on_ray


def main(name: str) -> None:
    """Run a stage in the working directory, which is the workspace, on the cluster of RAY_ADDRESS.

    What an Airflow task asked for is recorded in the stage cache here, so that the end of the job
    is the end of the task. A job of somebody else leaves the stage cache alone.
    """
    stage = find_stage(name)
    run_stage(stage, partial(_run, stage))
    if RAY_JOB_VARIABLE in os.environ:
        record(Path.cwd(), name)


def _run(stage: Stage, recipe: Recipe, workspace: Path) -> None:
    if stage.resources is Resources.WORKERS:
        from ray_jobs.train_on_ray import train_on_ray

        train_on_ray(recipe, workspace)
    else:
        _run_tasks(stage, recipe, workspace)


def _run_tasks(stage: Stage, recipe: Recipe, workspace: Path) -> None:
    """Have its tasks run on all CPUs, or on a GPU each: on as many as train may have."""
    connect()
    has = ray.cluster_resources()
    most = recipe.resources.most_workers if stage.resources.on_gpus else 0
    gpus = min(int(has.get("GPU", 0)), most)
    holds(workspace, stage.name, workers=gpus or int(has["CPU"]), gpus=gpus)
    stage.function()(recipe, workspace, partial(map_on_ray, gpus=gpus))


if __name__ == "__main__":
    main(*sys.argv[1:])
