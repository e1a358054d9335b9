"""A stage as an Airflow task: restored from the stage cache, or run and then recorded in it.

Stage code never runs in Airflow's process: it runs from the run's workspace, as a Ray job or as a
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

from pipelines.core.product import CODE
from pipelines.core.settings import GPU_POOL, PROJECT, load_settings
from pipelines.datasets.run_source import recipe_of, with_dataset
from pipelines.datasets.versions import find
from pipelines.orchestration.dataset_refresh import triggering_version
from pipelines.orchestration.links import DataDocsLink, MlflowRunLink, RayJobLink, RayJobLogLink
from pipelines.orchestration.naming import workspace_name
from pipelines.orchestration.ray_job import RayJobOperator, TaskKilledError
from pipelines.orchestration.task_lineage import StageLineage, parent_variables
from pipelines.orchestration.task_liveness import task_process
from pipelines.orchestration.trigger_form import PREPARED, asked_recipe, mistakes_fail_the_task
from pipelines.orchestration.webhook import keep_failure
from pipelines.recipe.schedule_section import MAIN_DAG
from pipelines.run.records import ValidateRecord, record_path
from pipelines.run.workspace import Run
from pipelines.stage_cache.explanation import KEEP, explain, keep
from pipelines.stage_cache.open_workspace import open_workspace
from pipelines.stages.plan_check import keep_dry_run, keep_plan
from pipelines.stages.recording import record, restore
from pipelines.stages.run_tracking import open_tracking
from pipelines.stages.stage import Resources, find_stage
from pipelines.stages.stage_process import forget_error, stage_environment, user_error
from pipelines.tracking.tracked_run import data_docs_address

if TYPE_CHECKING:
    from airflow.sdk import Context

    from pipelines.recipe.recipe import Recipe

# For every task: retry outages and lost processes; a user's error fails the task at once.
RETRIES = {
    "retries": 3,
    "retry_delay": timedelta(seconds=10),
    "retry_exponential_backoff": True,
    "max_retry_delay": timedelta(minutes=5),
    "on_failure_callback": keep_failure,
}


def stage_task(name: str, **kwargs: Any) -> "StageOperator | RayStageOperator":
    """Return the task of a stage: a child process or a Ray job, as the stage requires.

    Args:
        name: The name of the stage and the task.
        kwargs: The operator's arguments, such as `workspace`.

    Raises:
        UserError: There is no such stage.
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
        # Do not import these when the DAG file is parsed.
        from pipelines.orchestration.cluster_plan import (
            dry_run_on_cluster,
            plan_on_cluster,
            settle_on_cluster,
        )
        from pipelines.registry.parents import settle_run
        from pipelines.stages.beforehand import CHECKS, check_beforehand

        with mistakes_fail_the_task(self.task_id, run_id):
            run = settle_run(_recipe(context))
            check_beforehand(run, CHECKS)
            settings = load_settings()
            run = settle_on_cluster(settings, run)
            planned = plan_on_cluster(settings, run.ready, run.source)
            tried = dry_run_on_cluster(settings, run.ready)
            workspace = open_workspace(
                PROJECT, settings.home, run_id, run.recipe, run.source, ready=run.ready
            )
            if asked := (context["dag_run"].conf or {}).get(KEEP):
                names, who, why = asked["names"], asked["who"], asked["why"]
                for line in keep(workspace, settings.runs, names, who=who, why=why):
                    self.log.info("%s", line)
        if planned:
            keep_plan(workspace, planned)
        if tried:
            keep_dry_run(workspace, tried)
        for forecast in explain(workspace, settings.runs, planned):
            for line in forecast.lines():
                self.log.info("%s", line)
        address = open_tracking(workspace)
        MlflowRunLink().show(self, context, address)
        self.log.info("workspace %s, MLflow run %s", workspace, address)
        return str(workspace)


class StageOperator(StageLineage, BaseOperator):
    """A light stage: a child process of the Airflow worker, in the workspace."""

    template_fields: Collection[str] = ("workspace",)
    operator_extra_links = (DataDocsLink(), MlflowRunLink())

    def __init__(self, *, workspace: str = PREPARED, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stage: str = kwargs["task_id"]  # `self.task_id` begins with the task group's name
        self.workspace = workspace
        self.links: dict[str, str] = {}
        self._hook = SubprocessHook()
        self._parents: dict[str, str] = {}  # for a promotion in the child process

    def execute(self, context: "Context") -> dict[str, Any]:
        """Restore the stage's result, or run the stage and record it."""
        with self.at_work(context) as workspace:
            return outcome(self.stage, cached=self.run_stage(workspace))

    @contextmanager
    def at_work(self, context: "Context") -> Iterator[Path]:
        """Hold the task's process file within the block, which runs one process of the task."""
        workspace = Path(self.workspace)
        with task_process(workspace, context):
            _show_mlflow_run(self, context)
            self._parents = parent_variables(context)
            yield workspace

    def run_stage(self, workspace: Path) -> bool:
        """Restore the stage from the cache, or run it; return whether it was restored."""
        forget_error(workspace)
        if restore(workspace, self.stage):
            return True
        result = self._hook.run_command(
            [sys.executable, "-m", "pipelines.stages", self.stage],
            env=stage_environment(workspace) | self._parents,
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


class RayStageOperator(StageLineage, RayJobOperator):
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
        """Return the task's result if the stage cache has the stage's, or None."""
        cached = restore(Path(self.workspace), self.stage)
        return outcome(self.stage, cached=True) if cached else None

    def show_links(self, context: "Context") -> None:
        """Show the link to the MLflow run too."""
        _show_mlflow_run(self, context)


def _show_mlflow_run(operator: StageOperator | RayStageOperator, context: "Context") -> None:
    if address := Run.read(Path(operator.workspace)).mlflow_address:
        MlflowRunLink().show(operator, context, address)
        if operator.stage == ValidateRecord.stage:
            DataDocsLink().show(operator, context, data_docs_address(address))


def outcome(stage: str, *, cached: bool) -> dict[str, Any]:
    """Return a stage task's return value."""
    return {"stage": stage, "cached": cached}


def _recipe(context: "Context") -> "Recipe":
    """Return the requested recipe, on the dataset version that started the run, if one did.

    `llm_pipeline` then runs the recipe that the version was made with.
    """
    if label := triggering_version(context):
        version = find(label)
        by_hand = context["dag"].dag_id == MAIN_DAG
        return recipe_of(version) if by_hand else with_dataset(asked_recipe(context), version)
    return asked_recipe(context)
