"""Ray Train in as few processes as a training needs, on a cluster that has other jobs.

Ray's own `DataParallelTrainer` starts three processes more: an actor for the controller, one that
frees the workers' room if the controller dies, and one for Ray Data. Each takes two seconds of a
core, just when the workers import PyTorch. Here the controller lives in the job's driver, with
which Ray ends all that the job holds, and there is no Ray Data.

The number of workers follows from the room on the cluster. Ray Train divides the nodes' total
resources, the largest node first; it counts what other jobs hold as free, and then waits for
workers that can't start.
"""

import asyncio
import time
from collections import Counter
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.train import Result
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util import placement_group_table

from ray_jobs.draining import draining

SETTLE_S = 5.0  # until workers that have just ended have given back what they held


class RayTrainer(DataParallelTrainer):  # type: ignore[misc]  # Ray has no types
    """Its controller runs in this process; without Ray Data."""

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        needless = DatasetsCallback | PlacementGroupCleanerCallback
        callbacks = super()._create_default_callbacks()
        return [each for each in callbacks if not isinstance(each, needless)]

    def _initialize_and_run_controller(self, **parts: Any) -> Result:
        if self.scaling_config.elasticity_enabled:
            parts["scaling_policy"] = FreeScalingPolicy(self.scaling_config)
        controller = _Controller(**parts)
        try:
            asyncio.run(controller.run())
        finally:
            controller.end()
        return controller.get_result()


class _WorkerGroup(WorkerGroup):  # type: ignore[misc]
    def _init_train_context_on_workers(
        self, workers: Any, sync_actor: Any, train_context_args: Any
    ) -> None:
        """Do as Ray's, which also tells workers of their controller's actor: here it is none."""
        ray.get(
            [
                worker.actor.init_train_context.remote(
                    train_run_context=self._train_run_context,
                    distributed_context=worker.distributed_context,
                    synchronization_actor=sync_actor,
                    storage_context=self._storage_context,
                    worker_callbacks=self._worker_callbacks_to_propagate,
                    controller_actor=None,
                    **{name: values[i] for name, values in train_context_args.items()},
                )
                for i, worker in enumerate(workers)
            ]
        )
        self._decorate_worker_log_file_paths(workers)


class _Controller(TrainController):  # type: ignore[misc]
    worker_group_cls = _WorkerGroup

    def end(self) -> None:
        """End the workers where the controller could not: it does not end with a process."""
        if self._worker_group and self._worker_group.has_started():
            self._worker_group.abort()


class FreeScalingPolicy(ElasticScalingPolicy):  # type: ignore[misc]  # Ray has no types
    """Counts what is free, and what the workers hold: Ray ends them only as others take over.

    Nodes that are drained take no new worker.
    """

    def __init__(self, scaling_config: Any) -> None:
        super().__init__(scaling_config)
        self._short_since: float | None = None

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        held, leaving = _held(), draining()
        reserved = {node: has for node, has in reserved_resources.items() if node not in leaving}
        needed = self.scaling_config._resources_per_worker_not_none
        free = {
            node: {name: float(available.get(name, 0.0)) + held[node, name] for name in needed}
            for node, available in available_resources_per_node().items()
            if node not in leaving
        }
        possible: int = super()._count_possible_workers(reserved)
        now_possible: int = super()._count_possible_workers(free)
        now = time.monotonic()
        short_since = self._short_since or now
        if now_possible < possible and not held and now - short_since < SETTLE_S:
            self._short_since = short_since
            return 0
        self._short_since = None
        return now_possible


def _held() -> Counter[tuple[str, str]]:
    """Return what this job's workers, failed ones too, hold of each node and resource."""
    job = ray.get_runtime_context().get_job_id()
    held = Counter[tuple[str, str]]()
    for group_id, group in placement_group_table().items():
        if group["state"] == "REMOVED" or not group_id.endswith(job):  # as Ray's ids are built
            continue
        for bundle, node in group["bundles_to_node_id"].items():
            for name, amount in group["bundles"][bundle].items():
                held[node, name] += amount
    return held
