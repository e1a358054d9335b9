"""A training on the cluster at RAY_ADDRESS; with a number only, waits for so many nodes."""

import sys
import time

import ray

from pipelines.stages.standalone import open_workspace, parse_job
from ray_jobs.train_on_ray import train_on_ray

_LIMIT_S = 120


def main(arguments: list[str]) -> None:
    if arguments[0].isdigit():
        end = time.monotonic() + _LIMIT_S
        while not _has_nodes(int(arguments[0])):
            if time.monotonic() > end:
                raise SystemExit(f"the cluster has no {arguments[0]} nodes")
            time.sleep(0.5)
        return
    job = parse_job("several_hosts_ray", arguments)
    with open_workspace(job) as workspace:
        ray.init()
        train_on_ray(job.recipe, workspace)


def _has_nodes(number: int) -> bool:
    try:
        ray.init(logging_level="ERROR", ignore_reinit_error=True)
    except ConnectionError:
        return False
    return len([node for node in ray.nodes() if node["Alive"]]) == number


if __name__ == "__main__":
    main(sys.argv[1:])
