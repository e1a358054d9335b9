"""Evaluate as a Ray job: `python -m ray_jobs.evaluate`, from the workspace."""

from pipelines.stages.evaluate import evaluation
from ray_jobs.data_stage import run_data_stage


def main() -> None:
    """Run the stage in the working directory."""
    run_data_stage(evaluation.STAGE, evaluation.run, on_gpus=True)


if __name__ == "__main__":
    main()
