"""A stage of the pipeline: all that Airflow, Ray, DVC, MLflow and the command line know about it.

Each stage is a package below `pipelines/stages` with a `Stage` named `STAGE`. A new stage needs
such a package, a paragraph in `dvc.yaml`, and a line in a DAG.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pipelines.core.errors import UserError
from pipelines.run.records import stage_names


class Resources(Enum):
    """Where a stage runs, and the other arguments of its `run` besides recipe and workspace."""

    PROCESS = "a child process of the Airflow worker"
    CPU_TASKS = "a Ray job: `map_ordered` runs tasks on all CPUs of the cluster"
    GPU_TASKS = "a Ray job: `map_ordered` runs tasks with a GPU each, if the cluster has GPUs"
    WORKERS = "a Ray job: Ray Train runs the recipe's number of workers, with a GPU each if any"

    @property
    def on_gpus(self) -> bool:
        """Whether the stage uses GPUs if there are any, and so waits for its turn in their pool."""
        return self in (Resources.GPU_TASKS, Resources.WORKERS)


@dataclass(frozen=True)
class Stage:
    """A stage.

    Attributes:
        name: The name of the stage, its package, its task in Airflow, its paragraph in `dvc.yaml`,
            its folder of outputs, and its folder among the MLflow run's artifacts.
        does: What the stage does, for its page in Airflow.
        inputs: The stages whose outputs it reads.
        run: `module:function`, called with the recipe and the workspace, where the stage runs.
        publish: `module:function`, called with the workspace to log the stage's outputs to MLflow.
            `run` calls it itself; `publish_outputs` calls it for outputs from the stage cache.
        resources: Where it runs.
    """

    name: str
    does: str
    inputs: tuple[str, ...]
    run: str
    publish: str | None = None
    resources: Resources = Resources.PROCESS

    def function(self) -> Callable[..., Any]:
        """Import and return the function that does the work."""
        found: Callable[..., Any] = resolve_name(self.run)
        return found

    def publish_outputs(self, workspace: Path) -> None:
        """Log outputs from the stage cache to the workspace's MLflow run."""
        if self.publish:
            resolve_name(self.publish)(workspace)


def find_stage(name: str) -> Stage:
    """Return the stage of this name.

    Raises:
        UserError: There is no such stage.
    """
    package = f"{__package__}.{name}"
    found = import_module(package) if name.isidentifier() and find_spec(package) else None
    stage = getattr(found, "STAGE", None)
    if not isinstance(stage, Stage):
        names = ", ".join(stage_names())
        raise UserError(f"no stage is named {name!r}; the stages are {names}")
    return stage
