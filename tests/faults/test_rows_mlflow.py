"""Row 13: the MLflow server is away for a minute; nothing is lost and nothing is there twice."""

import sqlite3
import time
from contextlib import closing

import pytest

from tests.faults.pipeline_run import START_LIMIT_S, PipelineRun
from tests.faults.processes import find, frozen, kept_down

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

AWAY_S = 60


def test_row_13_mlflow_is_away_mid_training(scenario, reference):
    run = scenario.start()
    run.wait_for_step()
    with run.fault("service lost"), kept_down(run.platform, "mlflow"):
        time.sleep(AWAY_S)
    scenario.ends_well(run, like=reference)


def test_row_13_mlflow_is_away_at_registration(scenario, reference):
    run = scenario.start()
    run.wait_for_task("register", "running", "success")
    with run.fault("service lost", registered(run)), kept_down(run.platform, "mlflow"):
        assert run.task_state("register") == "running"
        time.sleep(AWAY_S)
    scenario.ends_well(run, like=reference)


def test_row_13_mlflow_is_away_at_the_aliass_move(scenario, reference):
    """The version is in the registry, and nobody has told the server yet that it is champion."""
    run = scenario.start()
    run.wait_for_task("register", "running", "success")
    command = ["-m", "pipelines.stages", "register"]
    process = find(
        run.platform,
        lambda process: process.cmdline()[1:] == command and process.cwd() == str(run.workspace),
        "the process of register",
    )
    run.wait(lambda: rows(run, "model_versions"), "the version", START_LIMIT_S, every=0.0005)
    with run.fault("service lost", registered(run)), frozen(process):
        assert not rows(run, "registered_model_aliases"), "the alias had moved already"
        with kept_down(run.platform, "mlflow"):
            process.resume()
            time.sleep(AWAY_S)
    scenario.ends_well(run, like=reference)


def registered(run: PipelineRun):
    """Whether the run's model was registered."""
    return lambda: run.task_state("register") == "success"


def rows(run: PipelineRun, table: str) -> int:
    """How many rows about the run's model the server's database has."""
    path = run.platform.settings.home / "mlflow" / "mlflow.db"
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        found: int = database.execute(
            f"SELECT count(*) FROM {table} WHERE name = ?", (run.model,)
        ).fetchone()[0]
    return found
