"""A run has a Ray cluster of its own while it trains: the end of its head is no other run's."""

import asyncio
import shlex
import sys
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from pipelines.core.settings import PROJECT
from pipelines.orchestration.jobs_api import ADDRESS_FILE, Job, JobsApi, TokenFile
from pipelines.platform.airflow_api import AirflowApi
from pipelines.platform.dag_runs import DAG
from pipelines.run.logbook import read_logbook
from tests.conftest import running_platform
from tests.e2e.airflow_runs import DagRun
from tests.faults.pipeline_run import PipelineRun, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def site():
    """A platform whose site has a command for clusters."""
    command = f"{shlex.quote(sys.executable)} -m tests.e2e.site_clusters"
    variables = {"PENSTOCK_NODES": command, "PENSTOCK_GPU": "cpu", "PYTHONPATH": str(PROJECT)}
    with running_platform(**variables) as platform:
        yield platform


def jobs(site, url: str) -> dict[str, str]:
    """The status of each job that a cluster knows, by the task that submitted it."""
    token = TokenFile(site.settings.ray_token_path)
    answer = httpx.get(f"{url}/api/jobs/", auth=token, timeout=30, trust_env=False)
    return {
        f"{each['metadata']['dag_run_id']} {each['metadata']['task_id']}": each["status"]
        for each in answer.raise_for_status().json()
        if each.get("metadata", {}).get("task_id")
    }


@pytest.fixture
def other(site) -> Iterator[Callable[[], str]]:
    """The status of a job of somebody else, on the platform's cluster."""
    name = "somebody-elses"

    async def ask(action: str, *arguments: object) -> Job | None:
        async with JobsApi(site.settings.ray_url, site.settings.ray_token_path) as jobs:
            return await getattr(jobs, action)(name, *arguments)

    asyncio.run(ask("submit", "sleep 3600", {}, {}))
    yield lambda: asyncio.run(ask("get")).status
    asyncio.run(ask("stop"))


def test_its_jobs_run_there_and_outlive_its_head(site, other):
    platform = site.settings.ray_url
    run = PipelineRun(site, "apart")
    run.wait_for_step()
    own = (run.workspace / ADDRESS_FILE).read_text().strip()
    assert f"{run.run_id} train" in jobs(site, own)
    assert f"{run.run_id} preprocess" in jobs(site, platform)
    assert f"{run.run_id} train" not in jobs(site, platform)

    port = own.rpartition(":")[2]
    (gcs,) = [each for each in psutil.process_iter(["cmdline"]) if is_gcs_of(each, port)]
    with run.fault("cluster lost"):
        gcs.kill()
    assert run.wait_for_end() == "success", run.logs()
    kinds = [entry.kind for entry in read_logbook(run.workspace)]
    assert kinds.count("cluster lost") == 1
    assert "failure" not in kinds
    assert not (run.workspace / ADDRESS_FILE).exists()
    until(lambda: refused(own), "the end of the run's cluster", 60)
    assert "FAILED" not in jobs(site, platform).values()
    assert other() == "RUNNING"


def test_it_comes_again_with_a_training_that_is_cleared(site):
    run = PipelineRun(site, "again")
    run.wait_for_step()
    first = (run.workspace / ADDRESS_FILE).read_text().strip()
    task = DagRun(AirflowApi(site.settings), DAG, run.run_id)
    task._send("PATCH", "/taskInstances/train", {"new_state": "failed"})
    until(lambda: refused(first), "the end of the run's cluster", 60)
    assert run.wait_for_end() == "failed"
    seen = run.step
    assert not (run.workspace / ADDRESS_FILE).exists()

    task.clear("train", "evaluate", "register")
    run.wait(lambda: run.step > seen, "steps on another cluster", 300)
    second = (run.workspace / ADDRESS_FILE).read_text().strip()
    assert second != first
    assert f"{run.run_id} train" in jobs(site, second)
    assert run.wait_for_end() == "success", run.logs()
    until(lambda: refused(second), "the end of the run's second cluster", 60)


def is_gcs_of(process: psutil.Process, port: str) -> bool:
    """Whether it is the heart of the head whose sessions lie in the run's own folder."""
    line = " ".join(process.info["cmdline"] or ())
    return "gcs_server" in line and f"own-{port}" in line


def refused(url: str) -> bool:
    """Whether nobody listens there any more."""
    try:
        httpx.get(url, timeout=5, trust_env=False)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it is ending
        return False
    return False
