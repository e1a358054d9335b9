"""Start, follow and summarize one run of `llm_pipeline` from outside Airflow.

`run_foreground` runs one stage for `penstock stage`, as a child process of the terminal.
"""

import hashlib
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pipelines.core.errors import UserError
from pipelines.core.machine import has_cuda_driver
from pipelines.core.settings import PROJECT, Settings
from pipelines.planning.precision_rule import Device, is_settled, settle_precision
from pipelines.platform.airflow_api import AirflowApi
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import RESOLVED, override_values
from pipelines.registry.parents import settle_run
from pipelines.run.progress import Progress, ProgressReader
from pipelines.run.records import (
    RUN_FILE,
    EvaluateRecord,
    Record,
    RegisterRecord,
    TrainRecord,
    record_path,
    stage_names,
)
from pipelines.run.workspace import Run, workspace_path
from pipelines.stage_cache import dvc_cache
from pipelines.stage_cache.explanation import KEEP
from pipelines.stage_cache.open_workspace import open_workspace, project_state
from pipelines.stages.stage import Stage
from pipelines.stages.stage_process import forget_error, stage_environment, user_error

T = TypeVar("T", bound=Record)

DAG = "llm_pipeline"
_POLL_S = 1.0
_OVER = ("success", "failed")


@dataclass(frozen=True)
class StageState:
    """The state of a stage; `seconds` counts from its start and includes waiting for Ray."""

    state: str | None
    seconds: float | None
    cached: bool = False


@dataclass
class Summary:
    """The summary of a run that `penstock run --json` prints."""

    dag_run_id: str
    state: str
    stages: dict[str, StageState]
    mlflow_run_id: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    verdict: str | None = None
    model: dict[str, Any] | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain JSON values."""
        return asdict(self)


def page(settings: Settings, run_id: str) -> str:
    """Return the URL of a run's page in Airflow."""
    return f"{settings.airflow_url}/dags/{DAG}/runs/{run_id}"


def make_ready(airflow: AirflowApi) -> bool:
    """Wait for the DAG, unpause it and so its schedule; return whether it was paused."""
    airflow.wait_for_dag(DAG)
    return airflow.unpause(DAG)


def start(airflow: AirflowApi, recipe: Recipe, kept: Mapping[str, Any] | None = None) -> str:
    """Trigger the DAG with a whole recipe and return the run's id.

    Args:
        airflow: The client of Airflow's API.
        recipe: The recipe to run.
        kept: The arguments `names`, `who` and `why` of `keep`, if results should be kept.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    run_id = f"{recipe.name}-{stamp}-{secrets.token_hex(2)}"
    airflow.trigger(
        DAG, run_id, {RESOLVED: recipe.to_dict()} | ({KEEP: dict(kept)} if kept else {})
    )
    return run_id


def follow(
    airflow: AirflowApi, settings: Settings, run_id: str
) -> Iterator[tuple[str, str] | Progress]:
    """Yield (task, new state) and progress until the run is over."""
    progress = ProgressReader(workspace_path(settings.runs, run_id))
    seen: dict[str, str | None] = {}
    while True:
        over = airflow.run_state(DAG, run_id) in _OVER
        yield from progress.read()
        tasks = airflow.tasks(DAG, run_id)
        for name in ("prepare", *stage_names()):
            state = tasks.get(name, {}).get("state")
            if state and seen.get(name) != state:
                seen[name] = state
                yield name, state
        if over:
            return
        time.sleep(_POLL_S)


def summarize(airflow: AirflowApi, settings: Settings, run_id: str) -> Summary:
    """Return the summary of a run, read from Airflow and from the run's workspace."""
    workspace = workspace_path(settings.runs, run_id)
    tasks = airflow.tasks(DAG, run_id)
    summary = Summary(
        dag_run_id=run_id,
        state=airflow.run_state(DAG, run_id),
        stages={name: _stage(airflow, run_id, name, tasks.get(name, {})) for name in stage_names()},
        error=user_error(workspace),
    )
    if (workspace / RUN_FILE).is_file():
        summary.mlflow_run_id = Run.read(workspace).mlflow_run_id
    _add_results(summary, workspace)
    return summary


def _stage(airflow: AirflowApi, run_id: str, name: str, task: dict[str, Any]) -> StageState:
    result = airflow.result(DAG, run_id, name) if task.get("state") == "success" else None
    return StageState(task.get("state"), task.get("duration"), bool(result and result["cached"]))


def _add_results(summary: Summary, workspace: Path) -> None:
    if train := _record(TrainRecord, workspace):
        summary.metrics |= train.metrics
    if evaluate := _record(EvaluateRecord, workspace):
        summary.metrics["bits_per_byte"] = evaluate.bits_per_byte
        summary.metrics["perplexity"] = evaluate.perplexity
        summary.metrics |= {f"baseline/{name}": v for name, v in evaluate.baselines.items()}
    if register := _record(RegisterRecord, workspace):
        summary.verdict = register.verdict.decision
        summary.model = register.model.model_dump(mode="json") if register.model else None


def _record(kind: type[T], workspace: Path) -> T | None:
    return kind.read(workspace) if record_path(workspace, kind.stage).is_file() else None


def run_foreground(stage: Stage, recipe: Recipe, settings: Settings) -> tuple[Path, int]:
    """Run a stage, record it in the stage cache and return its workspace and exit code.

    Calls with the same code, recipe and data share one workspace.
    """
    one_process = override_values(recipe, {"resources.workers": 1})
    recipe = _for_this_machine(one_process)
    run = settle_run(recipe)
    identity = f"{project_state(PROJECT)}{run.recipe.fingerprint()}{run.source}"
    run_id = f"stage-{recipe.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    workspace = open_workspace(
        PROJECT, settings.home, run_id, run.recipe, run.source, ready=run.ready
    )
    names = stage_names()
    for needed in names[: names.index(stage.name)]:
        if not dvc_cache.restore(workspace, needed) and needed in stage.inputs:
            raise UserError(
                f"{stage.name} reads the output of {needed}, and {needed} has not run with this "
                f"code, recipe and data; run `penstock stage {needed}` first, with the same options"
            )
    forget_error(workspace)
    command = [sys.executable, "-m", "pipelines.stages", stage.name]
    code = subprocess.run(
        command, cwd=workspace, env=stage_environment(workspace), check=False
    ).returncode
    if code == 0:
        dvc_cache.commit(workspace, stage.name)
    return workspace, code


def _for_this_machine(recipe: Recipe) -> Recipe:
    """Return the recipe with the precision of the device on which a stage would train here."""
    if is_settled(recipe):
        return recipe
    if not has_cuda_driver():
        return settle_precision(recipe, Device(is_cpu=True, has_bf16=False))
    # Both import torch, which takes seconds.
    from pipelines.models.served import inference_device
    from pipelines.stages.train.train_layout import properties

    return settle_precision(recipe, properties(inference_device()))
