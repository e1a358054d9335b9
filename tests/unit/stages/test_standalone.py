import fcntl
import time
from pathlib import Path

import pytest

from pipelines.recipe.recipe_files import override_values
from pipelines.run.workspace import Run
from pipelines.stages.standalone import Job, open_workspace
from pipelines.stages.train import train_stage
from tests.unit.stages.train.test_train_stage import RECIPE, history, make_workspace


def test_a_job_that_ended_begins_anew_wherever_its_checkpoints_are(tmp_path: Path) -> None:
    elsewhere = {"train.checkpoints": str(tmp_path / "elsewhere"), "data.source.max_documents": 1}
    job = Job(override_values(RECIPE, elsewhere), make_workspace(tmp_path / "w"))
    records = []
    for _ in range(2):
        with open_workspace(job) as workspace:
            records.append(train_stage.run(job.recipe, workspace))
        assert [point["step"] for point in history(workspace)] == [1, 2, 3, 4, 5, 6]
    assert records[0] == records[1]


def test_a_job_that_goes_on_is_the_same_run_until_it_ends(tmp_path: Path) -> None:
    recipe = override_values(RECIPE, {"data.source.max_documents": 1})
    job = Job(recipe, make_workspace(tmp_path / "w"))
    tries = []
    for ends in (False, True, False):
        with open_workspace(job) as workspace:
            tries.append(Run.read(workspace).dag_run_id)
            if ends:
                train_stage.run(recipe, workspace)
        time.sleep(1.0)  # ids are told apart by their second
    assert tries[0] == tries[1] != tries[2]


def test_another_recipe_in_the_same_workspace_is_another_run(tmp_path: Path) -> None:
    runs = []
    for seed in (1, 2):
        recipe = override_values(RECIPE, {"data.source.max_documents": 1, "seed": seed})
        with open_workspace(Job(recipe, tmp_path / "w")) as workspace:
            runs.append(Run.read(workspace))
    assert runs[0].recipe_fingerprint != runs[1].recipe_fingerprint


def test_the_same_job_elsewhere_waits(tmp_path: Path) -> None:
    job = Job(override_values(RECIPE, {"data.source.max_documents": 1}), tmp_path / "w")
    with (
        open_workspace(job) as workspace,
        (workspace / ".stage.lock").open("w") as file,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
