"""A user clears or marks a task: its job ends and frees what it held, triggerer or none."""

import time
from collections.abc import Callable

import httpx
import psutil
import pytest

from pipelines.orchestration.job_state import JobState
from pipelines.platform.airflow_api import AirflowApi
from pipelines.platform.dag_runs import DAG, make_ready, start
from pipelines.platform.supervisor import GROUP, Supervisor
from pipelines.recipe.recipe_files import load_recipe
from pipelines.run.logbook import read_logbook
from pipelines.run.workspace import workspace_path
from pipelines.stages.stage_process import RAY_JOB_VARIABLE
from tests.conftest import Platform
from tests.processor_time import limit

WITHIN_S = 15


class Run:
    """A run of the pipeline whose data no other run has."""

    def __init__(self, platform: Platform, *overrides: str) -> None:
        self.platform = platform
        self.airflow = AirflowApi(platform.settings)
        make_ready(self.airflow)
        self.id = start(self.airflow, load_recipe("debug", list(overrides)))
        self.workspace = workspace_path(platform.settings.runs, self.id)

    def wait_for(self, task: str, state: str) -> None:
        until(lambda: self.state(task) == state, f"{task} to be {state}", 240)

    def state(self, task: str) -> str | None:
        return self.airflow.tasks(DAG, self.id).get(task, {}).get("state")

    def live_job(self, task: str, *, other_than: str = "") -> str:
        """The task's job as soon as its driver runs."""

        def runs() -> bool:
            submissions = JobState.of(self.workspace, task, -1).read().submissions
            return bool(
                submissions
                and submissions[-1] != other_than
                and self.state(task) == "deferred"
                and self.drivers(submissions[-1])
            )

        until(runs, f"the job of {task}", 240)
        return JobState.of(self.workspace, task, -1).read().submissions[-1]

    def drivers(self, job: str) -> list[psutil.Process]:
        """The job's command, and what it has started on this machine but not by Ray."""
        ours = [p for p in self.platform.processes() if variable(p, RAY_JOB_VARIABLE) == job]
        return [p for p in ours if "ray_jobs." in command(p)]

    def used_cpus(self) -> float:
        """What Ray has promised to somebody."""
        data = self.ray("/api/cluster_status")["data"]["clusterStatus"]
        return data["loadMetricsReport"]["usage"]["CPU"][0]

    def status(self, job: str) -> str:
        return self.ray(f"/api/jobs/{job}")["status"]

    def ray(self, path: str) -> dict:
        settings = self.platform.settings
        token = settings.ray_token_path.read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.get(f"{settings.ray_url}{path}", headers=headers, timeout=30)
        return answer.raise_for_status().json()

    def mark(self, task: str, state: str) -> None:
        path = f"/api/v2/dags/{DAG}/dagRuns/{self.id}/taskInstances/{task}"
        self.airflow._client.patch(path, json={"new_state": state}).raise_for_status()

    def clear(self, task: str) -> None:
        body = {"dag_run_id": self.id, "task_ids": [task], "dry_run": False}
        body |= {"only_failed": False, "include_downstream": True}
        path = f"/api/v2/dags/{DAG}/clearTaskInstances"
        self.airflow._client.post(path, json=body).raise_for_status()

    def wait_for_end_of(self, job: str, *, another_follows: bool = False) -> None:
        """The job is stopped, and what it held is free; a job that follows holds it soon."""

        def free() -> bool:
            status = self.status(job)
            assert status != "SUCCEEDED", "the job was done before it could be stopped"
            over = status == "STOPPED" and not self.drivers(job)
            return over and (another_follows or self.used_cpus() == 0)

        until(free, f"the end of {job}", WITHIN_S)


def until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit(seconds), f"waited {seconds:.0f} s for {what}"
        time.sleep(0.3)
    print(f"{what}: {time.monotonic() - began:.1f} s")


def variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except psutil.Error:
        return None


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture
def no_triggerer(platform):
    """Stops the triggerer until the end of the test."""
    supervisor = Supervisor(platform.runtime)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        with supervisor._rpc() as rpc:
            rpc.stopProcess(f"{GROUP}:triggerer", True)
        stopped = True

    yield stop
    if stopped:
        supervisor.start("triggerer")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_a_user_decides_about_a_deferred_task(platform, no_triggerer):
    # So much data that no job is done before the user has decided.
    run = Run(platform, "data.validation_fraction=0.21", "data.source.max_documents=null")

    first = run.live_job("preprocess")
    run.clear("preprocess")
    run.wait_for_end_of(first, another_follows=True)
    second = run.live_job("preprocess", other_than=first)

    run.mark("preprocess", "success")
    run.wait_for_end_of(second)
    assert run.state("preprocess") == "success"

    # Without an output `validate` fails, and the run with it. Airflow on SQLite, which locks no
    # row, can lose a Clear in the very moment in which the scheduler ends the run.
    until(lambda: run.airflow.run_state(DAG, run.id) == "failed", "the end of the run", 60)
    run.clear("preprocess")
    third = run.live_job("preprocess", other_than=second)
    no_triggerer()
    run.mark("preprocess", "failed")
    run.wait_for_end_of(third)
    assert run.state("preprocess") == "failed"

    # Each decision once, though every part that saw it acted on it.
    until(lambda: len(decisions(run)) == 4, "four decisions in the logbook", 20)
    said = ["cleared", "marked success", "cleared", "marked failed"]
    assert [entry.cause.removeprefix("admin ").removesuffix(" it") for entry in decisions(run)] == (
        said
    )


@pytest.mark.timeout(900)
def test_a_running_stage_ends_with_its_task(platform):
    run = Run(platform, "data.validation_fraction=0.22")
    run.wait_for("validate", "running")

    def children() -> list[psutil.Process]:
        found = [p for p in platform.processes() if variable(p, "PYTHONPATH") == str(run.workspace)]
        return [p for p in found if "-m pipelines.stages" in command(p)]

    until(lambda: bool(children()), "the stage's process", 60)
    run.mark("validate", "failed")
    until(lambda: not children(), "the end of the stage's process", WITHIN_S)
    assert run.state("validate") == "failed"


def decisions(run: Run) -> list:
    return [entry for entry in read_logbook(run.workspace) if entry.kind == "human decision"]
