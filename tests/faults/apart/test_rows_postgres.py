"""Row 30: Airflow's and MLflow's databases are away for a minute, or another server takes over."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipelines.core.errors import UserError
from pipelines.run.logbook import read_logbook
from tests.conftest import Platform, running_platform
from tests.faults.pipeline_run import START_LIMIT_S, PipelineRun, until
from tests.postgres_server import PostgresServer, postgres_server

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

AWAY_S = 60
ENDING = ("scheduler", "triggerer", "dag-processor")  # parts that do, without their database


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="module")
def platform(
    server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    pgpass: Path = tmp_path_factory.mktemp("secrets") / "pgpass"
    pgpass.write_text(server.pgpass)
    pgpass.chmod(0o600)
    with running_platform(PENSTOCK_DATABASE_URL=server.url, PGPASSFILE=str(pgpass)) as platform:
        yield platform


def comes_back(scenario: Any, run: PipelineRun, reference: PipelineRun) -> None:
    """The run ends well; the parts of Airflow that end without a database are told of."""
    until(lambda: answers(run), "Airflow's answer", START_LIMIT_S)
    assert run.wait_for_end() == "success", run.logs()
    lost = [each.cause for each in read_logbook(run.workspace) if each.kind == "service lost"]
    # Those that start in vain are not told of.
    parts = [part for cause in lost for part in ENDING if part in cause]
    assert len(parts) == len(lost) == len(set(parts)), lost
    if lost:
        run.expected["service lost"] = len(lost)
    scenario.ends_well(run, like=reference)
    assert len(scenario.watch.seen(run, "train")) == 1


def answers(run: PipelineRun) -> bool:
    """Whether Airflow's API finds the run."""
    with suppress(httpx.HTTPError, UserError):
        return bool(run.state)
    return False


def test_row_30_postgres_is_away(scenario, reference, server):
    run = scenario.start()
    run.wait_for_step()
    server.stop()
    time.sleep(AWAY_S)
    server.start()
    comes_back(scenario, run, reference)


def test_row_30_postgres_fails_over(scenario, reference, server):
    """Nothing that a server had told is lost: the second one has each commit first."""
    replica = server.replicate()
    run = scenario.start()
    run.wait_for_step()
    replica.take_over()
    comes_back(scenario, run, reference)
