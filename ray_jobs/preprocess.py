"""Preprocess as a Ray job: `python -m ray_jobs.preprocess`, from the workspace."""

from pipelines.stages.preprocess import preprocessing
from ray_jobs.data_stage import run_data_stage


def main() -> None:
    """Run the stage in the working directory."""
    run_data_stage(preprocessing.STAGE, preprocessing.run)


if __name__ == "__main__":
    main()
