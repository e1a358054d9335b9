"""One stage as a process: the working directory is the workspace, exit code 2 is a user's error.

`error.json` carries the error's one-line message to the process that started this one, because a
Ray job's log is for users only. A stage that works for too long is ended by its own process, so the
time limit needs neither Airflow nor Ray.
"""

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pipelines.core.errors import EXIT_USER_ERROR, UserError
from pipelines.core.log import set_up_logging
from pipelines.core.settings import load_settings
from pipelines.core.storage import one_at_a_time, read_json, write_json, write_text
from pipelines.recipe.recipe import Recipe
from pipelines.run.logbook import Entry, note, read_logbook
from pipelines.run.records import (
    EvaluateRecord,
    PreprocessRecord,
    TrainRecord,
    output_folder,
    record_path,
)
from pipelines.run.usage import metered, usage_of
from pipelines.run.workspace import read_recipe
from pipelines.stages.stage import Stage
from pipelines.tracking.mlflow_client import PATIENT

_HOUR_S = 3600.0
_KIND = "time limit"
# By the tokenizer, by the weights, and to compare with them.
_START_FROM_MODELS = (PreprocessRecord.stage, TrainRecord.stage, EvaluateRecord.stage)

_log = logging.getLogger(__name__)


@contextmanager
def time_limit(
    workspace: Path, stage: str, hours: float | None, keep: Callable[[UserError], None]
) -> Iterator[None]:
    """End the process if the stage works for more than `hours`, all its tries together.

    The process ends at once; a Ray job's driver thereby ends the whole job. When a user clears the
    task in Airflow, the stage gets the same time again.

    Args:
        workspace: The folder with the stage's usage and the logbook.
        stage: The stage's name.
        hours: The limit; None is no limit.
        keep: Called with the error before the process ends.
    """
    if hours is None:
        yield
        return
    before = sum(entry.kind == _KIND and entry.stage == stage for entry in read_logbook(workspace))
    left = (before + 1) * hours * _HOUR_S - usage_of(workspace, stage).seconds
    over = threading.Event()
    watchdog = threading.Thread(
        target=_watch,
        args=(over, left, partial(_tell, workspace, stage, hours, before, keep)),
        daemon=True,
    )
    watchdog.start()
    try:
        yield
    finally:
        over.set()


def _watch(over: threading.Event, left: float, tell: Callable[[], None]) -> None:
    if over.wait(max(left, 0.0)):
        return
    try:
        tell()
    finally:
        os._exit(EXIT_USER_ERROR)  # even if other threads are busy or the disk is full


def _tell(
    workspace: Path, stage: str, hours: float, before: int, keep: Callable[[UserError], None]
) -> None:
    error = UserError(
        f"{stage} reached its time limit, resources.max_stage_hours = {hours:g}; clear the task to "
        "let it continue for the same time again, or start a run with a higher limit"
    )
    _log.error("%s", error)
    keep(error)
    entry = Entry(
        kind=_KIND,
        key=f"{_KIND} {stage} {before + 1}",
        stage=stage,
        cause=f"resources.max_stage_hours = {hours:g}",
        done="the whole job was ended",
    )
    note(workspace, entry)


ERROR_FILE = "error.json"
FAILURE_FILE = "failure.json"  # in a workspace: the task that failed last, and why
TRACEBACK_FILE = "error.log"
STAGE_LOCK = ".stage.lock"
RAY_JOB_VARIABLE = "PENSTOCK_RAY_JOB_ID"  # the job's own submission id

StageFunction = Callable[[Recipe, Path], object]


def run_stage(stage: Stage, run: StageFunction) -> None:
    """Run a stage in the working directory; after a user's error, exit with code 2.

    Args:
        stage: The stage to run.
        run: The function that does the work here, or a function that runs it on a cluster.
    """
    set_up_logging()
    workspace = Path.cwd()
    try:
        need_inputs(workspace, stage)
        # The child process of a killed task may continue for a while.
        with one_at_a_time(workspace / STAGE_LOCK), metered(workspace, stage.name):
            recipe = read_recipe(workspace)
            if stage.name in _START_FROM_MODELS:
                from pipelines.registry.parents import with_folders  # Airflow imports this module

                recipe = with_folders(recipe)
            keep = partial(keep_error, workspace, stage.name)
            with time_limit(workspace, stage.name, recipe.resources.max_stage_hours, keep):
                run(recipe, workspace)
    except UserError as error:
        keep_error(workspace, stage.name, error)
        sys.stderr.write(f"{stage.name}: {error}\n")
        sys.exit(EXIT_USER_ERROR)


def stage_variables(workspace: Path) -> dict[str, str]:
    """Return a stage's extra environment variables; they make it import the workspace's code."""
    settings = load_settings()
    return {
        "PYTHONPATH": str(workspace),
        "PENSTOCK_HOME": str(settings.home),
        "MLFLOW_TRACKING_URI": settings.mlflow_url,
        "PENSTOCK_DATASETS_URL": settings.datasets_url,
        "PENSTOCK_DATASETS_REMOTE": settings.datasets_remote,
        **PATIENT,
    }


def stage_environment(workspace: Path) -> dict[str, str]:
    """Return the whole environment of a stage that runs as a child process."""
    return {**os.environ, **stage_variables(workspace)}


def keep_error(workspace: Path, stage: str, error: UserError) -> None:
    """Write a user's error to the file that `user_error` reads, and its traceback beside it."""
    write_json(workspace / ERROR_FILE, {"stage": stage, "message": str(error)})
    write_text(workspace / TRACEBACK_FILE, "".join(traceback.format_exception(error)))


def user_error(workspace: Path, stage: str | None = None) -> str | None:
    """Return the message of the user's error that ended the last stage (or `stage`), if any."""
    path = workspace / ERROR_FILE
    error = read_json(path) if path.exists() else {}
    return error.get("message") if stage in (None, error.get("stage")) else None


def forget_error(workspace: Path) -> None:
    """Remove an earlier user's error, before a new try."""
    (workspace / ERROR_FILE).unlink(missing_ok=True)


def need_inputs(workspace: Path, stage: Stage) -> None:
    """Raise a UserError if an earlier stage has not finished in this workspace."""
    for needed in stage.inputs:
        if not record_path(workspace, needed).is_file():
            raise UserError(
                f"{stage.name} reads {output_folder(workspace, needed)}, which is not complete; "
                f"run `penstock stage {needed}` first"
            )
