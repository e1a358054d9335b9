"""`python -m pipelines.stages NAME`: a stage in one process, without Ray or Airflow."""

import sys
from pathlib import Path

from pipelines.core.records import STAGES
from pipelines.stages.run_tracking import close_tracking
from pipelines.stages.runner import run_stage


def main(stage: str) -> None:
    """Run one stage in the working directory; each imports only what it needs."""
    match stage:
        case "preprocess":
            from pipelines.stages import preprocess

            run_stage(stage, preprocess.run)
        case "validate":
            from pipelines.stages import validate

            run_stage(stage, validate.run)
        case "train":
            from pipelines.stages import train

            run_stage(stage, train.run)
        case "evaluate":
            from pipelines.stages import evaluate

            run_stage(stage, evaluate.run)
        case "register":
            from pipelines.stages import register

            run_stage(stage, register.run)
            close_tracking(Path.cwd(), "FINISHED")
        case _:
            sys.exit(f"no stage is named {stage!r}; the stages are {', '.join(STAGES)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
