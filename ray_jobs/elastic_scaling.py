"""How many workers there is room for, on a cluster that has other jobs.

Ray Train divides what the nodes have; what other jobs hold of it, it takes for free, and waits for
workers that can't start.
"""

import time
from collections import Counter
from typing import Any

from ray._private.state import available_resources_per_node
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, ScalingDecision
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState

SETTLE_S = 5.0  # until workers that have just ended have given back what they held


class FreeScalingPolicy(ElasticScalingPolicy):  # type: ignore[misc]  # Ray has no types
    """Counts what is free, and what the workers themselves hold."""

    def __init__(self, scaling_config: Any) -> None:
        super().__init__(scaling_config)
        self._workers = Counter[str]()  # by node
        self._short_since: float | None = None

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """All that is free now is for the workers; what is short may come in a moment."""
        self._workers.clear()
        return super().make_decision_for_non_running_worker_group()

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        """More where there is more; never fewer, as workers that run have what they need."""
        self._workers = Counter(each.metadata.node_id for each in worker_group_state.workers)
        return super().make_decision_for_running_worker_group(
            worker_group_state, worker_group_status
        )

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        possible: int = super()._count_possible_workers(reserved_resources)
        free: int = super()._count_possible_workers(self._free_of(reserved_resources))
        now = time.monotonic()
        short_since = self._short_since or now
        if free < possible and not self._workers and now - short_since < SETTLE_S:
            self._short_since = short_since
            return 0
        self._short_since = None
        return free

    def _free_of(self, reserved_resources: Any) -> dict[str, dict[str, float]]:
        needed = self.scaling_config._resources_per_worker_not_none
        available = available_resources_per_node()

        def free(node: str, name: str) -> float:
            ours: float = self._workers[node] * needed.get(name, 0.0)
            return ours + float(available.get(node, {}).get(name, 0.0))

        return {
            node: {name: min(amount, free(node, name)) for name, amount in resources.items()}
            for node, resources in reserved_resources.items()
        }
