"""A training job on Ray without Airflow: preprocess where missing, and its own MLflow run.

From anywhere: `python -m ray_jobs.train --recipe debug --set train.steps=50`.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.core.errors import EXIT_USER_ERROR, UserError
from pipelines.core.log import set_up_logging
from pipelines.core.storage import write_text
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import PreprocessRecord, TrainRecord, record_path
from pipelines.stages.preprocess import preprocessing
from pipelines.stages.run_tracking import close_tracking, open_tracking
from pipelines.stages.standalone import open_workspace, parse_job
from pipelines.training.preemption import EXIT_BY_SIGTERM, PreemptedError
from ray_jobs.connection import connect
from ray_jobs.notice import listening_for_notice
from ray_jobs.ray_map import map_on_ray
from ray_jobs.train_on_ray import train_on_ray


def main(*arguments: str) -> None:
    """Train a recipe; exits with 2 and one line where a user is to blame.

    It exits with 143 where it was asked to end and saved: started anew, it goes on.
    """
    set_up_logging()
    try:
        job = parse_job("python -m ray_jobs.train", arguments)
        connect()
        with open_workspace(job) as workspace:
            print(f"workspace {workspace}\nMLflow run {open_tracking(workspace)}")  # noqa: T201
            with _telling_of_open_run(workspace):
                try:
                    with listening_for_notice():
                        _run(job.recipe, workspace)
                except PreemptedError:
                    raise  # the same command goes on in the same MLflow run
                except BaseException:
                    close_tracking(workspace, "FAILED")
                    raise
                close_tracking(workspace, "FINISHED")
    except UserError as error:
        sys.stderr.write(f"{TrainRecord.stage}: {error}\n")
        sys.exit(EXIT_USER_ERROR)
    except PreemptedError as ended:
        sys.stderr.write(f"{TrainRecord.stage}: {ended}, by the same command\n")
        sys.exit(EXIT_BY_SIGTERM)


@contextmanager
def _telling_of_open_run(workspace: Path) -> Iterator[None]:
    """Within the block the file that PENSTOCK_OPEN_RUN names tells of an open MLflow run.

    It has the run's workspace. Who starts the job finds it where this process was killed, and
    closes the run.
    """
    file = os.environ.get("PENSTOCK_OPEN_RUN")
    if file is None:
        yield
        return
    write_text(Path(file), str(workspace))
    try:
        yield
    finally:
        Path(file).unlink(missing_ok=True)


def _run(recipe: Recipe, workspace: Path) -> None:
    os.chdir(workspace)
    if not record_path(workspace, PreprocessRecord.stage).is_file():
        preprocessing.run(recipe, workspace, map_on_ray)
    train_on_ray(recipe, workspace)


if __name__ == "__main__":
    main(*sys.argv[1:])
