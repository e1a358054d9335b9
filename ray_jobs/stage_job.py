"""A stage as the Ray job of an Airflow task: run, and recorded in the stage cache."""

import os
from pathlib import Path

from pipelines.stages.recording import record
from pipelines.stages.stage_process import RAY_JOB_VARIABLE, StageFunction, run_stage


def run_stage_job(stage: str, run: StageFunction) -> None:
    """Run a stage in the working directory, which is the workspace.

    What an Airflow task asked for is recorded here, so that the end of the job is the end of the
    task. A job of somebody else leaves the stage cache alone.
    """
    run_stage(stage, run)
    if RAY_JOB_VARIABLE in os.environ:
        record(Path.cwd(), stage)
