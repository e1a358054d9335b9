"""Storing outputs in the stage cache, restoring them, and logging a stage's cost to MLflow."""

import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core.settings import load_settings
from pipelines.core.storage import may_pass, what_is_full
from pipelines.run import usage
from pipelines.run.logbook import Entry, note
from pipelines.stage_cache import dvc_cache
from pipelines.stage_cache.open_workspace import STAGE_CACHE
from pipelines.stages.costs import report_costs
from pipelines.stages.stage import find_stage
from pipelines.stages.stage_process import stage_environment

if TYPE_CHECKING:
    from tenacity import RetryCallState

RETRY_S = 10.0
LONGEST_S = 600.0  # the longest time that a stage waits for space in the cache

_log = logging.getLogger(__name__)


def record(workspace: Path, stage: str) -> None:
    """Record a finished stage; if the disk is full, note it in the logbook and wait.

    Raises:
        OSError: The cache can't be written, even after waiting.
    """
    from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

    retrying = Retrying(
        retry=retry_if_exception(may_pass),
        wait=wait_fixed(RETRY_S),
        stop=stop_after_delay(LONGEST_S),
        before_sleep=partial(_tell, workspace, stage),
        reraise=True,
    )
    retrying(dvc_cache.commit, workspace, stage)
    report_costs(workspace, stage)


def restore(workspace: Path, stage: str) -> bool:
    """Restore a stage's outputs from the stage cache and log them; return whether they were there.

    A child process logs them, because the stage's code comes from the workspace.
    """
    if not dvc_cache.restore(workspace, stage):
        return False
    if find_stage(stage).publish:
        subprocess.run(
            [sys.executable, "-m", "pipelines.stages", stage, "--publish"],
            cwd=workspace,
            env=stage_environment(workspace),
            check=True,
        )
    usage.cached(workspace, stage)
    report_costs(workspace, stage)
    return True


def _tell(workspace: Path, stage: str, state: "RetryCallState") -> None:
    error = state.outcome and state.outcome.exception()
    reason = what_is_full(error, load_settings().home / STAGE_CACHE) if error else ""
    cause = f"the stage cache can't be written: {reason}"
    _log.warning("%s", cause)
    done = f"{stage} has run; its outputs are stored once there is space, tried every {RETRY_S:g} s"
    note(
        workspace,
        Entry(kind="storage", key=f"storage, cache, {stage}", stage=stage, cause=cause, done=done),
    )
