"""A stage as an Airflow task: out of the stage cache, or run and then recorded in it.

Stage code never runs in Airflow's process: it comes from the run's workspace, as a Ray job or as a
child process.
"""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from pipelines.core.records import RUN_FILE, ValidateRecord, record_path
from pipelines.core.settings import PROJECT, load_settings
from pipelines.ledger import stage_cache
from pipelines.ledger.datasets import find
from pipelines.ledger.run_source import recipe_of, settle
from pipelines.ledger.workspace import Run, open_workspace, workspace_path
from pipelines.orchestration.dataset_refresh import triggering_version
from pipelines.orchestration.links import DataDocsLink, MlflowRunLink, RayJobLink
from pipelines.orchestration.opening import PREPARED, asked_recipe, mistakes_fail_the_task
from pipelines.orchestration.ray_job import RayJobOperator
from pipelines.stages.publishing import PUBLISHED
from pipelines.stages.run_tracking import close_tracking, open_tracking
from pipelines.stages.runner import forget_error, stage_environment, user_error
from pipelines.tracking.run import data_docs_address
from pipelines.training.supported import supported

if TYPE_CHECKING:
    from airflow.sdk import Context

    from pipelines.core.recipe import Recipe

# Every task's: what the world got wrong is tried again, what a person got wrong fails at once.
RETRIES = {
    "retries": 3,
    "retry_delay": timedelta(seconds=10),
    "retry_exponential_backoff": True,
    "max_retry_delay": timedelta(minutes=5),
}


class PrepareOperator(BaseOperator):
    """Opens the run: checks the recipe, makes the workspace, begins the MLflow run."""

    operator_extra_links = (MlflowRunLink(),)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.links: dict[str, str] = {}

    def execute(self, context: "Context") -> str:
        """Return the workspace's path."""
        run_id = context["dag_run"].run_id
        with mistakes_fail_the_task(self.task_id, run_id):
            recipe, source = settle(_recipe(context))
            supported(recipe)
            workspace = open_workspace(PROJECT, load_settings().home, run_id, recipe, source)
        address = open_tracking(workspace)
        MlflowRunLink().show(self, context, address)
        self.log.info("workspace %s, MLflow run %s", workspace, address)
        return str(workspace)


class StageOperator(BaseOperator):
    """A light stage: a child process of the Airflow worker, in the workspace."""

    template_fields = ("workspace",)
    operator_extra_links = (DataDocsLink(), MlflowRunLink())

    def __init__(self, *, workspace: str = PREPARED, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.workspace = workspace
        self.links: dict[str, str] = {}
        self._hook = SubprocessHook()

    def execute(self, context: "Context") -> dict[str, Any]:
        """Restore the stage, or run and record it."""
        workspace = Path(self.workspace)
        if address := Run.read(workspace).mlflow_address:
            MlflowRunLink().show(self, context, address)
            if self.task_id == ValidateRecord.stage:
                DataDocsLink().show(self, context, data_docs_address(address))
        forget_error(workspace)
        if _restored(workspace, self.task_id):
            return {"stage": self.task_id, "cached": True}
        result = self._hook.run_command(
            [sys.executable, "-m", "pipelines.stages", self.task_id],
            env=stage_environment(workspace),
            cwd=self.workspace,
        )
        if message := user_error(workspace, self.task_id):
            raise AirflowFailException(message)
        if result.exit_code:
            raise RuntimeError(f"{self.task_id} exited with code {result.exit_code}; see above")
        stage_cache.commit(workspace, self.task_id)
        return {"stage": self.task_id, "cached": False}

    def on_kill(self) -> None:
        """End the child with the task."""
        self._hook.send_sigterm()


class RayStageOperator(RayJobOperator):
    """A heavy stage: a Ray job that runs `ray_jobs.<stage>` from the workspace."""

    operator_extra_links = (RayJobLink(), MlflowRunLink())

    def __init__(self, *, workspace: str = PREPARED, **kwargs: Any) -> None:
        stage = kwargs["task_id"]
        super().__init__(workspace=workspace, entrypoint=f"python -m ray_jobs.{stage}", **kwargs)
        self._cached = False

    def skip(self) -> bool:
        """Whether the stage cache held the result."""
        self._cached = _restored(Path(self.workspace), self.task_id)
        return self._cached

    def execute(self, context: "Context") -> Any:
        """Restore the stage, or attach to its job, or submit it and defer."""
        self._show_mlflow_run(context)
        return super().execute(context)

    def resume(self, context: "Context", event: dict[str, Any]) -> Any:
        """Go on after the job's end, in a new process."""
        self._show_mlflow_run(context)
        return super().resume(context, event)

    def has_result(self) -> bool:
        """Whether the stage wrote its record, which it does last."""
        return record_path(Path(self.workspace), self.task_id).is_file()

    def finish(self) -> dict[str, Any]:
        """Record a stage that ran."""
        if not self._cached:
            stage_cache.commit(Path(self.workspace), self.task_id)
        return {"stage": self.task_id, "cached": self._cached}

    def _show_mlflow_run(self, context: "Context") -> None:
        if address := Run.read(Path(self.workspace)).mlflow_address:
            MlflowRunLink().show(self, context, address)


def close_failed_run(context: "Context") -> None:
    """DAG callback: the MLflow run of a failed DAG run ends as failed."""
    workspace = workspace_path(load_settings().runs, context["dag_run"].run_id)
    if (workspace / RUN_FILE).is_file():
        close_tracking(workspace, "FAILED")


def _recipe(context: "Context") -> "Recipe":
    """What the dataset version that started the run was made with; else what is asked for."""
    version = triggering_version(context)
    return recipe_of(find(version)) if version else asked_recipe(context)


def _restored(workspace: Path, stage: str) -> bool:
    if not stage_cache.restore(workspace, stage):
        return False
    if stage in PUBLISHED:
        subprocess.run(
            [sys.executable, "-m", "pipelines.stages.publishing", stage],
            cwd=workspace,
            env=stage_environment(workspace),
            check=True,
        )
    return True
