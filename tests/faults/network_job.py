"""A training on the Ray cluster at RAY_ADDRESS: `python -m tests.faults.network_job -- OPTIONS`."""

import sys

import ray

from pipelines.stages.preprocess import preprocessing
from pipelines.stages.standalone import open_workspace, parse_job
from ray_jobs import train


def main() -> None:
    """Preprocess here, train on the cluster."""
    job = parse_job("network_job", sys.argv[1:])
    with open_workspace(job) as workspace:
        preprocessing.run(job.recipe, workspace)
        ray.init()
        train.train_on_ray(job.recipe, workspace)


if __name__ == "__main__":
    main()
