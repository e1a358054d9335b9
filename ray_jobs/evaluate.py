"""Evaluate as a Ray job: `python -m ray_jobs.evaluate`, from the workspace."""

from functools import partial

import ray

from pipelines.stages import evaluate
from pipelines.stages.runner import run_stage
from ray_jobs.ray_map import map_on_ray


def main() -> None:
    """Run the workspace's recipe on the cluster that RAY_ADDRESS names, or on one of its own."""
    ray.init()
    run_stage(evaluate.STAGE, partial(evaluate.run, map_ordered=map_on_ray))


if __name__ == "__main__":
    main()
