"""How many workers there is room for, on a cluster that has other jobs.

Ray Train divides what the nodes have, the largest first; what other jobs hold there, it takes for
free, and waits for workers that can't start.
"""

import time
from collections import Counter
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy
from ray.util import placement_group_table

SETTLE_S = 5.0  # until workers that have just ended have given back what they held


class FreeScalingPolicy(ElasticScalingPolicy):  # type: ignore[misc]  # Ray has no types
    """Counts what is free, and what the workers hold: Ray ends them only as others take over."""

    def __init__(self, scaling_config: Any) -> None:
        super().__init__(scaling_config)
        self._short_since: float | None = None

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        held = _held()
        needed = self.scaling_config._resources_per_worker_not_none
        free = {
            node: {name: float(available.get(name, 0.0)) + held[node, name] for name in needed}
            for node, available in available_resources_per_node().items()
        }
        possible: int = super()._count_possible_workers(reserved_resources)
        now_possible: int = super()._count_possible_workers(free)
        now = time.monotonic()
        short_since = self._short_since or now
        if now_possible < possible and not held and now - short_since < SETTLE_S:
            self._short_since = short_since
            return 0
        self._short_since = None
        return now_possible


def _held() -> Counter[tuple[str, str]]:
    """What this job's workers, those that failed included, hold of each node and resource."""
    job = ray.get_runtime_context().get_job_id()
    held = Counter[tuple[str, str]]()
    for group_id, group in placement_group_table().items():
        if group["state"] == "REMOVED" or not group_id.endswith(job):  # as Ray's ids are built
            continue
        for bundle, node in group["bundles_to_node_id"].items():
            for name, amount in group["bundles"][bundle].items():
                held[node, name] += amount
    return held
