"""One stage as a process: the working directory is the workspace, exit code 2 is a user's error.

`error.json` carries the error's one line to whoever started the process: a Ray job's log is for
users only.

Ends a stage that works for too long, from within: neither Airflow nor Ray has to be there.
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
from pipelines.run.records import output_folder, record_path
from pipelines.run.usage import metered, usage_of
from pipelines.run.workspace import read_recipe
from pipelines.stages.stage import Stage
from pipelines.tracking.mlflow_client import PATIENT

_HOUR_S = 3600.0
_KIND = "time limit"

_log = logging.getLogger(__name__)


@contextmanager
def time_limit(
    workspace: Path, stage: str, hours: float | None, keep: Callable[[UserError], None]
) -> Iterator[None]:
    """The block may last until the stage has worked for so many hours, all its tries together.

    Then the process ends at once, which in a Ray job's driver ends the whole job. A user's Clear
    gives the same time again.

    Args:
        workspace: where the stage's usage and the logbook lie.
        stage: its name.
        hours: None is no limit.
        keep: is given the one line before the end.
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
        os._exit(EXIT_USER_ERROR)  # whatever the other threads do, and however full the disk is


def _tell(
    workspace: Path, stage: str, hours: float, before: int, keep: Callable[[UserError], None]
) -> None:
    error = UserError(
        f"{stage} reached its time limit, resources.max_stage_hours = {hours:g}; clear the task to "
        "give it as much again, from where it is, or start a run with a higher limit"
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
TRACEBACK_FILE = "error.log"
STAGE_LOCK = ".stage.lock"
RAY_JOB_VARIABLE = "PENSTOCK_RAY_JOB_ID"  # a job's own submission id

StageFunction = Callable[[Recipe, Path], object]


def run_stage(stage: Stage, run: StageFunction) -> None:
    """Run a stage in the working directory and exit: 0, or 2 after a user's error.

    Args:
        stage: Which.
        run: What does its work here: the stage's function, or what runs that on a cluster.
    """
    set_up_logging()
    workspace = Path.cwd()
    try:
        need_inputs(workspace, stage)
        # A killed task's child may live on for a while.
        with one_at_a_time(workspace / STAGE_LOCK), metered(workspace, stage.name):
            recipe = read_recipe(workspace)
            keep = partial(keep_error, workspace, stage.name)
            with time_limit(workspace, stage.name, recipe.resources.max_stage_hours, keep):
                run(recipe, workspace)
    except UserError as error:
        keep_error(workspace, stage.name, error)
        sys.stderr.write(f"{stage.name}: {error}\n")
        sys.exit(EXIT_USER_ERROR)


def stage_variables(workspace: Path) -> dict[str, str]:
    """What a stage's process needs beside its own environment: code comes from the workspace."""
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
    """The whole environment of a stage that runs as a child process."""
    return {**os.environ, **stage_variables(workspace)}


def keep_error(workspace: Path, stage: str, error: UserError) -> None:
    """Leave a user's error where `user_error` finds it, and its traceback beside it."""
    write_json(workspace / ERROR_FILE, {"stage": stage, "message": str(error)})
    write_text(workspace / TRACEBACK_FILE, "".join(traceback.format_exception(error)))


def user_error(workspace: Path, stage: str | None = None) -> str | None:
    """The line of the user's error that ended the last stage, if one did, or if `stage` did."""
    path = workspace / ERROR_FILE
    error = read_json(path) if path.exists() else {}
    return error.get("message") if stage in (None, error.get("stage")) else None


def forget_error(workspace: Path) -> None:
    """Before a new try."""
    (workspace / ERROR_FILE).unlink(missing_ok=True)


def need_inputs(workspace: Path, stage: Stage) -> None:
    """Raise UserError where an earlier stage has not finished in this workspace."""
    for needed in stage.inputs:
        if not record_path(workspace, needed).is_file():
            raise UserError(
                f"{stage.name} reads {output_folder(workspace, needed)}, which is not complete; "
                f"run `penstock stage {needed}` first"
            )
