"""The train stage on a Ray cluster: Ray Train starts the workers, and starts them again.

Ray Train gives the workers' PyTorch the variables of torchrun only, and the stage connects its
processes itself, as it does under torchrun. Ray's own `TorchTrainer` imports PyTorch in the driver
too, which takes seconds before the first step.
"""

import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError
from ray.train import BackendConfig, ControllerError, FailureConfig, RunConfig, ScalingConfig
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend

from pipelines.core.errors import SharedError, UnreachableError, UserError
from pipelines.recipe.recipe import Recipe
from pipelines.stages.stage_process import (
    forget_error,
    keep_error,
    stage_variables,
    user_error,
)
from pipelines.stages.train.train_logbook import job
from pipelines.training.preemption import PreemptedError
from pipelines.training.recipe_check import check_recipe
from ray_jobs.connection import connect
from ray_jobs.memory_shortage import MemoryShortage
from ray_jobs.ray_trainer import RayTrainer
from ray_jobs.train_overseer import FruitlessError, HostOutOfMemoryError, Overseer

STAGE = "train"
START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
RAY_TRAIN = {
    # Workers that start on a busy machine need more than Ray Train's minute.
    START_TIMEOUT: "300",
    # How often the controller looks at the workers, and so how late it sees their end.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # A process more for each group of workers, that tells of nodes being drained: the overseer asks
    # Ray itself, and so sooner.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
# With any number of workers, those of a node whose death is not known yet aren't waited for long.
ELASTIC = RAY_TRAIN | {START_TIMEOUT: "60"}
RESIZE_INTERVAL_S = 60.0  # at the least, from one look for more workers to the next
# What the overseer ends a try with, and says so by its type.
_OF_THE_OVERSEER = FruitlessError | HostOutOfMemoryError | OutOfMemoryError | PreemptedError


def train_on_ray(recipe: Recipe, workspace: Path) -> None:
    """Run the train stage on the recipe's number of workers, a GPU each where there are any.

    Of [min, max] workers there are as many as the cluster has room for. Where that changes, they
    start anew from the last checkpoint, with the same global batches in the same order. A run that
    gets on between its failures may have any number of them. Where a machine's memory runs out, the
    next try takes less or waits.

    Raises:
        UserError: the stage's, on any worker; it is not tried again.
        FruitlessError: the run failed several times in a row without a new checkpoint.
        PreemptedError: the job was asked to end or its own node is drained; the run has saved.
    """
    check_recipe(recipe)
    elastic = recipe.resources.is_elastic
    os.environ.update((ELASTIC if elastic else RAY_TRAIN) | os.environ)  # what is set stands
    forget_error(workspace)
    connect()
    shortage = MemoryShortage(recipe, workspace, on_gpus=_has_gpus())
    for number in itertools.count():
        life = f"{job()}, driver {os.getpid()}, try {number}"
        try:
            _fit(recipe, workspace, Overseer(recipe, workspace, life))
            return
        except (HostOutOfMemoryError, OutOfMemoryError) as error:
            shortage.met(life, error)


def _fit(recipe: Recipe, workspace: Path, overseer: Overseer) -> None:
    """Train, in one try.

    Raises:
        UserError: what a worker returned.
        HostOutOfMemoryError: the memory of a machine ran out.
        OutOfMemoryError: the same, as the workers started.
    """
    trainer = RayTrainer(
        _work,
        backend_config=TorchVariables(),
        train_loop_config={
            "recipe": recipe.to_dict(),
            "workspace": str(workspace),
            "environment": stage_variables(workspace),
        },
        scaling_config=ScalingConfig(
            num_workers=recipe.resources.workers,
            use_gpu=_has_gpus(),
            elastic_resize_monitor_interval_s=RESIZE_INTERVAL_S,
        ),
        run_config=RunConfig(
            name=STAGE,
            storage_path=str(workspace / "ray"),  # of Train's own state; checkpoints are ours
            failure_config=FailureConfig(max_failures=-1),  # the overseer says when it is enough
            callbacks=[overseer],
        ),
    )
    try:
        message: str | None = trainer.fit().return_value
    except ControllerError as error:
        if isinstance(error.controller_failure, _OF_THE_OVERSEER):
            raise error.controller_failure from error
        raise
    if message is not None:
        raise UserError(message)


def _has_gpus() -> bool:
    has_any: bool = ray.cluster_resources().get("GPU", 0) > 0
    return has_any


def _work(config: dict[str, Any]) -> str | None:
    """Return one worker; a user's error is returned, as one that is raised would be tried again.

    One of this worker alone is raised all the same, as the others wait for it in a collective; the
    try after that only tells it.
    """
    os.environ.update(config["environment"])

    from pipelines.core.log import set_up_logging
    from pipelines.core.settings import load_settings
    from pipelines.parallel.process_group import one_for_all, process_group
    from pipelines.recipe.recipe import Recipe
    from pipelines.stages.train import train_stage
    from pipelines.training.machine_notice import watching
    from ray_jobs.draining import RayNodes, leave_this_node
    from ray_jobs.samplers import SamplersOnRay

    set_up_logging()
    recipe, workspace = Recipe.model_validate(config["recipe"]), Path(config["workspace"])
    try:
        with (
            process_group(recipe.train.stall_seconds),
            watching(load_settings().notice, leave_this_node),
        ):
            with one_for_all():
                if line := user_error(workspace, STAGE):
                    raise UserError(line)
            report = _reporter(workspace.name)
            train_stage.run(
                recipe, workspace, report, start_samplers=SamplersOnRay, machines=RayNodes()
            )
    except UnreachableError:
        raise
    except SharedError as error:
        logging.getLogger(__name__).exception("a user's error; its line ends the job")
        return str(error)
    except UserError as error:
        keep_error(workspace, STAGE, error)
        raise
    return None


def _reporter(run: str) -> Callable[[Any], None]:
    """Tell Ray Train of the end only: each report waits for the controller's next look.

    Prometheus, where it is asked for, is told of each point by one worker.
    """
    from pipelines.core.settings import load_settings
    from ray_jobs.gauges import Gauges

    told = load_settings().metrics and ray.train.get_context().get_world_rank() == 0
    gauges = Gauges(run) if told else None

    def report(metrics: Any) -> None:
        if gauges is not None:
            gauges.show(metrics)
        if metrics.last:
            ray.train.report(metrics.curves())

    return report


class TorchVariables(BackendConfig):  # type: ignore[misc]  # Ray has no types
    """The backend configuration of a `DataParallelTrainer`."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Who sets them."""
        return _TorchVariables


class _TorchVariables(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True  # a worker picks its own by LOCAL_RANK

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:  # noqa: ARG002
        """Rank 0's node is where all meet."""
        address, port = worker_group.execute_single(0, get_address_and_port)
        worker_group.execute(_set_variables, address, port)


def _set_variables(address: str, port: int) -> None:
    worker = ray.train.get_context()
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(worker.get_world_rank()),
        "WORLD_SIZE": str(worker.get_world_size()),
        "LOCAL_RANK": str(worker.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(worker.get_local_world_size()),
        "NODE_RANK": str(worker.get_node_rank()),
    }
