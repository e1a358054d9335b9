"""Preprocess as a Ray job: `python -m ray_jobs.preprocess`, from the workspace."""

from pathlib import Path

import ray

from pipelines.core.log import set_up_logging
from pipelines.core.recipe_files import load_recipe
from pipelines.stages import preprocess
from ray_jobs.ray_map import map_on_ray


def main() -> None:
    """Run the workspace's recipe on the cluster that RAY_ADDRESS names, or on one of its own."""
    set_up_logging()
    ray.init()
    preprocess.run(load_recipe("params.yaml"), Path.cwd(), map_on_ray)


if __name__ == "__main__":
    main()
