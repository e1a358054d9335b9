"""A stage whose work is tasks over items, as a Ray job: Ray Data gives it all CPUs and no GPU."""

from collections.abc import Callable
from pathlib import Path

import ray

from pipelines.core.recipe import Recipe
from pipelines.core.usage import holds
from pipelines.data.mapping import MapOrdered
from ray_jobs.ray_map import map_on_ray
from ray_jobs.stage_job import run_stage_job


def run_data_stage(stage: str, run: Callable[[Recipe, Path, MapOrdered], object]) -> None:
    """Run the workspace's recipe on the cluster that RAY_ADDRESS names, or on one of its own."""
    ray.init()

    def on_the_cluster(recipe: Recipe, workspace: Path) -> None:
        holds(workspace, stage, workers=int(ray.cluster_resources()["CPU"]), gpus=0)
        run(recipe, workspace, map_on_ray)

    run_stage_job(stage, on_the_cluster)
