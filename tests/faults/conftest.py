"""One platform, one run of it without a fault, and then a fault after the other."""

import contextlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from pipelines.platform.dag_runs import DAG
from pipelines.platform.postmortem import _FAULTS
from tests.conftest import Platform
from tests.faults import checks
from tests.faults.checks import JobsWatch
from tests.faults.pipeline_run import PipelineRun
from tests.faults.processes import wait_until_ready


@contextmanager
def watched(platform: Platform) -> Iterator[JobsWatch]:
    """What Ray's Jobs API says while in the block."""
    watch = JobsWatch(platform.settings)
    watch.start()
    yield watch
    watch.close()


def unhurt(
    platform: Platform, watch: JobsWatch, model: str = "penstock-unhurt", **changes: Any
) -> PipelineRun:
    """A run that nothing befell, of the recipe with some of its keys changed."""
    run = PipelineRun(platform, model, **changes)
    assert run.wait_for_end() == "success", run.logs()
    assert len(watch.seen(run, "train")) == 1
    checks.one_mlflow_run(run)
    checks.one_version(run)
    checks.told_once(run)
    assert run.trained.steps == run.steps
    return run


@pytest.fixture(scope="session")
def watch(platform: Platform) -> Iterator[JobsWatch]:
    with watched(platform) as watch:
        yield watch


@pytest.fixture(scope="session")
def reference(platform: Platform, watch: JobsWatch) -> PipelineRun:
    return unhurt(platform, watch)


class Scenario:
    """A row of the matrix: runs that are started, hurt, and then checked.

    Attributes:
        checks: What was seen to hold, for the table.
    """

    def __init__(self, platform: Platform, watch: JobsWatch, row: str) -> None:
        self.platform = platform
        self.watch = watch
        self.runs: list[PipelineRun] = []
        self.checks: list[str] = []
        self.recoveries: list[float] = []
        self._row = row

    def start(self, **changes: Any) -> PipelineRun:
        """A run of the recipe, with some of its keys changed: `resources__workers=1`."""
        model = f"penstock-{self._row}-{len(self.runs)}"
        self.runs.append(run := PipelineRun(self.platform, model, **changes))
        return run

    def ends_well(self, run: PipelineRun, like: PipelineRun | None = None) -> None:
        """Success, the weights of another run, each thing once, each fault told, and told once."""
        self.recoveries += run.recoveries
        assert run.wait_for_end() == "success", run.logs()
        self.holds("success")
        if like is not None:
            self.holds(checks.same_weights(run, like))
        self.holds(checks.one_job_at_a_time(run, self.watch))
        self.holds(checks.one_mlflow_run(run))
        self.holds(checks.one_version(run))
        self.holds(checks.told_once(run))
        if run.expected:
            self.explains(run, *(_FAULTS[kind][0] for kind in run.expected))

    def holds(self, check: str) -> None:
        """Something was seen to hold."""
        if check not in self.checks:
            self.checks.append(check)

    def explains(self, run: PipelineRun, *faults: str) -> None:
        """`penstock why` names one of the faults in its first line, and has ten lines at most."""
        done = self.platform.penstock("why", run.run_id)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        lines = done.stdout.splitlines()
        assert len(lines) <= 10
        assert lines[0].startswith(faults), done.stdout
        self.holds(f"why: {lines[0]}")

    def clear_away(self) -> None:
        """End what a row that failed left running, so that the next one has the platform."""
        for run in self.runs:
            if run.state not in ("success", "failed"):
                path = f"/api/v2/dags/{DAG}/dagRuns/{run.run_id}"
                run.airflow._client.patch(path, json={"state": "failed"})
                self.watch.stop(run)


@pytest.fixture
def scenario(
    platform: Platform,
    watch: JobsWatch,
    request: pytest.FixtureRequest,
    record_property: Any,
) -> Iterator[Scenario]:
    """A row, on a platform whose parts all answer."""
    wait_until_ready(platform)
    row = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_")).strip("-")
    scenario = Scenario(platform, watch, row)
    yield scenario
    record_property("checks", json.dumps(scenario.checks))
    record_property("recovered", json.dumps([round(each, 1) for each in scenario.recoveries]))
    with contextlib.suppress(httpx.HTTPError):  # a platform that does not answer fails the next row
        scenario.clear_away()
