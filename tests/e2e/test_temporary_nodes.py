"""A run has nodes of its own while it trains: what the platform alone has no room for."""

import shlex
import sys

import psutil
import pytest

from pipelines.core.settings import PROJECT
from pipelines.platform.airflow_api import AirflowApi
from pipelines.platform.dag_runs import DAG
from tests.conftest import running_platform
from tests.e2e.airflow_runs import DagRun, wait_for
from tests.faults.nodes import alive
from tests.faults.pipeline_run import PipelineRun

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def site():
    """A platform whose site has a command for nodes."""
    command = f"{shlex.quote(sys.executable)} -m tests.e2e.site_nodes"
    # In a run's workspace the project's tests are there, but their imports come from here.
    variables = {"PENSTOCK_NODES": command, "PENSTOCK_GPU": "cpu", "PYTHONPATH": str(PROJECT)}
    with running_platform(**variables) as platform:
        yield platform


def started(site, name, **changes) -> PipelineRun:
    """A run that needs one CPU more than this machine has."""
    changes["resources__workers"] = psutil.cpu_count() + 1
    return PipelineRun(site, name, **changes)


def test_they_go_when_it_has_trained(site):
    assert alive(site.settings) == 1
    run = started(site, "roomy", train__steps=200)
    run.wait(lambda: run.step > 0, "a step", 240)
    assert alive(site.settings) == 2
    assert run.wait_for_end() == "success", run.logs()
    assert alive(site.settings) == 1
    states = {each["task_id"]: each["state"] for each in dag_run(site, run).tasks()}
    assert states["nodes_up"] == states["nodes_down"] == "success"


def test_they_go_where_a_user_ends_the_training(site):
    run = started(site, "ended")
    run.wait(lambda: run.step > 0, "a step", 240)
    task = dag_run(site, run)
    task._send("PATCH", "/taskInstances/train", {"new_state": "failed"})
    wait_for(lambda: alive(site.settings) == 1, "the end of the node", 60)
    assert run.wait_for_end() == "failed"


def test_they_go_where_a_user_ends_the_run(site):
    run = started(site, "abandoned")
    run.wait(lambda: run.step > 0, "a step", 240)
    dag_run(site, run).mark("failed")
    wait_for(lambda: alive(site.settings) == 1, "the end of the node", 60)


def dag_run(site, run) -> DagRun:
    """To see and to mark."""
    return DagRun(AirflowApi(site.settings), DAG, run.run_id)
