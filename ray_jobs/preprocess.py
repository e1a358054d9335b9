"""Preprocess as a Ray job: `python -m ray_jobs.preprocess`, from the workspace."""

from pipelines.stages import preprocess
from ray_jobs.data_stage import run_data_stage


def main() -> None:
    """Run the stage in the working directory."""
    run_data_stage(preprocess.STAGE, preprocess.run)


if __name__ == "__main__":
    main()
