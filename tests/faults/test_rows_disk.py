"""Rows 14, 18 and 20: a disk is full for a minute, a database is locked, a folder is gone."""

import shutil
import sqlite3
import time
from contextlib import closing

import pytest

from pipelines.stage_cache.open_workspace import STAGE_CACHE
from tests.faults.pipeline_run import START_LIMIT_S
from tests.faults.small_disk import full, small_disk

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

FULL_S = 60
CHECKPOINTS_MIB = 24  # a few of the recipe's model
CACHE_MIB = 100
RUNS_MIB = 400  # a clone of the project, and what a run makes


def test_row_14_the_disk_for_checkpoints_is_full(scenario, reference, tmp_path):
    with small_disk(tmp_path / "disk", CHECKPOINTS_MIB) as disk:
        run = scenario.start(train__checkpoints=disk)
        run.wait_for_step()
        with run.fault("storage"), full(disk):
            time.sleep(FULL_S)
        scenario.ends_well(run, like=reference)


def test_row_18_the_disk_for_workspaces_is_full(scenario, reference):
    with small_disk(scenario.platform.settings.runs, RUNS_MIB) as disk:
        run = scenario.start()
        run.wait_for_step()
        with run.fault("storage"), full(disk):
            time.sleep(FULL_S)
        scenario.ends_well(run, like=reference)


def test_row_18_the_disk_for_the_stage_cache_is_full(scenario, reference):
    cache = scenario.platform.settings.home / STAGE_CACHE
    with small_disk(cache, CACHE_MIB) as disk:
        run = scenario.start()
        run.wait_for_step()
        with run.fault("storage"), full(disk):
            run.wait(lambda: run.has_result("train"), "the trained model", START_LIMIT_S)
            time.sleep(FULL_S / 2)
        scenario.ends_well(run, like=reference)


def test_row_18_mlflows_database_is_locked(scenario, reference):
    run = scenario.start()
    run.wait_for_step()
    path = scenario.platform.settings.home / "mlflow" / "mlflow.db"
    with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(FULL_S)
        database.execute("ROLLBACK")
    scenario.ends_well(run, like=reference)
    scenario.explains(run, "A service was lost: MLflow's database was locked")


def test_row_20_a_workspace_is_deleted(scenario, tmp_path):
    """The run ends, and says why in a line; the platform is none the worse for it."""
    run = scenario.start()
    run.wait_for_step()
    gone = run.workspace.rename(tmp_path / "gone")  # at once, whatever is being written
    shutil.rmtree(gone, ignore_errors=True)
    assert run.wait_for_end() == "failed"
    assert not scenario.watch.live(run, "train")
    removed = f"{run.workspace}: the run's workspace was removed"
    scenario.explains(run, f"An error ended the stage: {removed}")
