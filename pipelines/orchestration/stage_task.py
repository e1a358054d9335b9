"""A stage as an Airflow task: out of the stage cache, or run and then recorded in it.

Stage code never runs in Airflow's process: it comes from the run's workspace, as a Ray job or as a
child process.
"""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from pipelines.core.settings import GPU_POOL, PROJECT, load_settings
from pipelines.datasets.run_source import recipe_of, settle
from pipelines.datasets.versions import find
from pipelines.orchestration.dataset_refresh import triggering_version
from pipelines.orchestration.jobs_api import CODE
from pipelines.orchestration.links import DataDocsLink, MlflowRunLink, RayJobLink, RayJobLogLink
from pipelines.orchestration.naming import workspace_name
from pipelines.orchestration.ray_job import RayJobOperator, TaskKilledError
from pipelines.orchestration.task_liveness import task_process
from pipelines.orchestration.trigger_form import PREPARED, asked_recipe, mistakes_fail_the_task
from pipelines.orchestration.webhook import keep_failure
from pipelines.run.records import ValidateRecord, record_path
from pipelines.run.workspace import Run
from pipelines.stage_cache.explanation import KEEP, explain, keep
from pipelines.stage_cache.open_workspace import open_workspace
from pipelines.stages.plan_check import keep_plan
from pipelines.stages.recording import record, restore
from pipelines.stages.run_tracking import open_tracking
from pipelines.stages.stage import Resources, find_stage
from pipelines.stages.stage_process import forget_error, stage_environment, user_error
from pipelines.tracking.tracked_run import data_docs_address
from pipelines.training.recipe_check import check_recipe

if TYPE_CHECKING:
    from airflow.sdk import Context

    from pipelines.recipe.recipe import Recipe

# Every task's: what the world got wrong is tried again, what a user got wrong fails at once.
RETRIES = {
    "retries": 3,
    "retry_delay": timedelta(seconds=10),
    "retry_exponential_backoff": True,
    "max_retry_delay": timedelta(minutes=5),
    "on_failure_callback": keep_failure,
}


def stage_task(name: str, **kwargs: Any) -> "StageOperator | RayStageOperator":
    """Return the task of a stage, which runs where the stage says.

    Args:
        name: Of the stage, and of the task.
        kwargs: Of the operator, such as `workspace`.

    Raises:
        UserError: there is no such stage.
    """
    stage = find_stage(name)
    common = {"task_id": name, "doc_md": stage.does} | kwargs
    if stage.resources is Resources.PROCESS:
        return StageOperator(**common)
    pool = {"pool": GPU_POOL} if stage.resources.on_gpus else {}
    return RayStageOperator(**pool, **common)


class PrepareOperator(BaseOperator):
    """Opens the run: checks the recipe, plans it, makes the workspace, begins the MLflow run."""

    operator_extra_links = (MlflowRunLink(),)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.links: dict[str, str] = {}

    def execute(self, context: "Context") -> str:
        """Return the workspace's path."""
        run_id = workspace_name(self.dag_id, context["dag_run"].run_id)
        with mistakes_fail_the_task(self.task_id, run_id):
            recipe, source = settle(_recipe(context))
            check_recipe(recipe)
            # Not when the DAG file is parsed.
            from pipelines.orchestration.cluster_plan import plan_on_cluster

            settings = load_settings()
            planned = plan_on_cluster(settings, recipe, source)
            workspace = open_workspace(PROJECT, settings.home, run_id, recipe, source)
            if asked := (context["dag_run"].conf or {}).get(KEEP):
                names, who, why = asked["names"], asked["who"], asked["why"]
                for line in keep(workspace, settings.runs, names, who=who, why=why):
                    self.log.info("%s", line)
        if planned:
            keep_plan(workspace, planned)
        for forecast in explain(workspace, settings.runs, planned):
            for line in forecast.lines():
                self.log.info("%s", line)
        address = open_tracking(workspace)
        MlflowRunLink().show(self, context, address)
        self.log.info("workspace %s, MLflow run %s", workspace, address)
        return str(workspace)


class StageOperator(BaseOperator):
    """A light stage: a child process of the Airflow worker, in the workspace."""

    template_fields: Collection[str] = ("workspace",)
    operator_extra_links = (DataDocsLink(), MlflowRunLink())

    def __init__(self, *, workspace: str = PREPARED, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stage: str = kwargs["task_id"]  # `self.task_id` has the name of a task group before it
        self.workspace = workspace
        self.links: dict[str, str] = {}
        self._hook = SubprocessHook()

    def execute(self, context: "Context") -> dict[str, Any]:
        """Restore the stage, or run and record it."""
        with self.at_work(context) as workspace:
            return outcome(self.stage, cached=self.run_stage(workspace))

    @contextmanager
    def at_work(self, context: "Context") -> Iterator[Path]:
        """What the task does in one process, in its workspace."""
        workspace = Path(self.workspace)
        with task_process(workspace, context):
            _show_mlflow_run(self, context)
            yield workspace

    def run_stage(self, workspace: Path) -> bool:
        """Whether the stage came out of the cache; else it has run."""
        forget_error(workspace)
        if restore(workspace, self.stage):
            return True
        result = self._hook.run_command(
            [sys.executable, "-m", "pipelines.stages", self.stage],
            env=stage_environment(workspace),
            cwd=self.workspace,
        )
        if message := user_error(workspace, self.stage):
            raise AirflowFailException(message)
        if result.exit_code:
            raise RuntimeError(f"{self.stage} exited with code {result.exit_code}; see above")
        record(workspace, self.stage)
        return False

    def on_kill(self) -> None:
        """End the child and this process; Airflow calls it in a signal handler."""
        with suppress(ProcessLookupError):
            self._hook.send_sigterm()
        raise TaskKilledError("Airflow ends this process of the task")


class RayStageOperator(RayJobOperator):
    """A heavy stage: a Ray job that runs and records it, with the workspace's code."""

    operator_extra_links = (RayJobLink(), RayJobLogLink(), MlflowRunLink())

    def __init__(self, *, workspace: str = PREPARED, **kwargs: Any) -> None:
        stage = kwargs["task_id"]
        super().__init__(
            workspace=workspace,
            entrypoint=f"python -m ray_jobs.stage_job {stage}",
            result=str(record_path(Path(), stage)),
            returns=outcome(stage, cached=False),
            ship=CODE if load_settings().ship_code else (),
            **kwargs,
        )

    def skip(self) -> dict[str, Any] | None:
        """What there is to say where the stage cache held the result."""
        cached = restore(Path(self.workspace), self.stage)
        return outcome(self.stage, cached=True) if cached else None

    def show_links(self, context: "Context") -> None:
        """The MLflow run's, too."""
        _show_mlflow_run(self, context)


def _show_mlflow_run(operator: StageOperator | RayStageOperator, context: "Context") -> None:
    if address := Run.read(Path(operator.workspace)).mlflow_address:
        MlflowRunLink().show(operator, context, address)
        if operator.stage == ValidateRecord.stage:
            DataDocsLink().show(operator, context, data_docs_address(address))


def outcome(stage: str, *, cached: bool) -> dict[str, Any]:
    """A stage task's return value."""
    return {"stage": stage, "cached": cached}


def _recipe(context: "Context") -> "Recipe":
    """What the dataset version that started the run was made with; else what is asked for."""
    version = triggering_version(context)
    return recipe_of(find(version)) if version else asked_recipe(context)
