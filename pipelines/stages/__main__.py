"""`python -m pipelines.stages NAME`: a stage in one process, without Ray or Airflow."""

import ctypes
import os
import signal
import sys
from pathlib import Path

from pipelines.run.records import STAGES, RegisterRecord
from pipelines.stages.run_tracking import close_tracking
from pipelines.stages.stage_process import run_stage

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main(stage: str) -> None:
    """Run one stage in the working directory; each imports only what it needs."""
    match stage:
        case "preprocess":
            from pipelines.stages.preprocess import preprocessing

            run_stage(stage, preprocessing.run)
        case "validate":
            from pipelines.stages.validate import data_gate

            run_stage(stage, data_gate.run)
        case "train":
            from pipelines.stages.train import train_stage

            run_stage(stage, train_stage.run)
        case "evaluate":
            from pipelines.stages.evaluate import evaluation

            run_stage(stage, evaluation.run)
        case "register":
            from pipelines.stages.register import register_stage

            run_stage(stage, register_stage.run)
            if not RegisterRecord.read(Path.cwd()).needs_approval:
                close_tracking(Path.cwd(), "FINISHED")
        case _:
            sys.exit(f"no stage is named {stage!r}; the stages are {', '.join(STAGES)}")


def end_with_parent() -> None:
    """Let Linux end this process with the one that started it, also with one that is killed.

    Airflow tries a task again whose process died; the stage that it had begun must be over then.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died just before
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    main(*sys.argv[1:])
