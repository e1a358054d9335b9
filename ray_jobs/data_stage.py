"""A stage whose work is tasks over items, as a Ray job."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import ray

from pipelines.data.passes import MapOrdered
from pipelines.recipe.recipe import Recipe
from pipelines.run.usage import holds
from ray_jobs.connection import connect
from ray_jobs.ray_map import map_on_ray
from ray_jobs.stage_job import run_stage_job


def run_data_stage(
    stage: str, run: Callable[[Recipe, Path, MapOrdered], object], *, on_gpus: bool = False
) -> None:
    """Run the workspace's recipe on the cluster that RAY_ADDRESS names.

    Args:
        stage: Its name.
        run: What it does.
        on_gpus: Its tasks compute with a model: where the cluster has GPUs, each gets one, of as
            many as train may have. Without, they get all CPUs and no GPU.
    """

    def on_the_cluster(recipe: Recipe, workspace: Path) -> None:
        connect()
        has = ray.cluster_resources()
        gpus = min(int(has.get("GPU", 0)), recipe.resources.most_workers) if on_gpus else 0
        holds(workspace, stage, workers=gpus or int(has["CPU"]), gpus=gpus)
        run(recipe, workspace, partial(map_on_ray, gpus=gpus))

    run_stage_job(stage, on_the_cluster)
