"""`python -m pipelines.stages NAME` runs a stage in one process, without Ray or Airflow.

With `--publish` the stage does not run, but logs the outputs in the workspace to MLflow.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

from pipelines.stages.stage import find_stage
from pipelines.stages.stage_process import run_stage

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main(name: str, *options: str) -> None:
    """Run one stage in the working directory, or publish its outputs."""
    stage = find_stage(name)
    if options == ("--publish",):
        stage.publish_outputs(Path.cwd())
    else:
        run_stage(stage, stage.function())


def end_with_parent() -> None:
    """Let Linux end this process when the process that started it ends, even if that is killed.

    Airflow retries a task whose process died; the stage that it had started must have ended then.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died just before
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    main(*sys.argv[1:])
