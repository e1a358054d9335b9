"""The platform's reconciler against the real Ray: it stops what it knows for an orphan, only."""

import asyncio
import shutil
import time

import pytest

from pipelines.orchestration.job_state import Generation, JobState
from pipelines.orchestration.jobs_api import ADDRESS_FILE, jobs_api
from pipelines.platform.reconciler import reconcile_once
from tests.processor_time import limit

pytestmark = pytest.mark.usefixtures("platform_variables")


def metadata(home, workspace) -> dict[str, str]:
    """Of a run that Airflow does not know."""
    return {
        "home": str(home),
        "workspace": str(workspace),
        "dag_id": "llm_pipeline",
        "dag_run_id": "deleted",
        "task_id": "train",
        "map_index": "-1",
        "max_tries": "3",
        "began": "2026-01-01T00:00:00+00:00",
    }


async def submit(name: str, said: dict[str, str]) -> None:
    async with jobs_api() as jobs:
        await jobs.submit(name, "sleep 300", {}, said)


async def statuses(*names: str) -> list[str]:
    async with jobs_api() as jobs:
        found = [await jobs.get(name) for name in names]
    return [job.status for job in found if job]


async def stop(*names: str) -> None:
    async with jobs_api() as jobs:
        for name in names:
            await jobs.stop(name)


def wait_for_end(orphan: str, began: float) -> None:
    while asyncio.run(statuses(orphan)) != ["STOPPED"]:
        assert time.monotonic() - began < limit(15)
        time.sleep(0.5)


def test_a_runs_own_cluster_that_is_gone_keeps_no_other_from_being_looked_at(platform, tmp_path):
    workspace, orphan = platform.settings.runs / "with-its-own", "penstock-orphan-1"
    workspace.mkdir(parents=True)
    (workspace / ADDRESS_FILE).write_text("http://127.0.0.1:1")
    JobState.of(tmp_path, "train", -1).update(Generation(), submissions=(orphan,))
    try:
        asyncio.run(submit(orphan, metadata(platform.settings.home, tmp_path)))
        wait_for_end(orphan, time.monotonic())
    finally:
        asyncio.run(stop(orphan))
        shutil.rmtree(workspace)


def test_an_orphan_is_stopped_and_what_is_not_ours_is_left_alone(platform, tmp_path):
    home = platform.settings.home
    workspace = tmp_path / "workspace"
    orphan = "penstock-orphan-0"
    JobState.of(workspace, "train", -1).update(Generation(), submissions=(orphan,))
    others = {
        "a-users-own": metadata(home, workspace),
        "penstock-a-users-own": {},
        "penstock-of-another-home-0": metadata(tmp_path, workspace),
        "penstock-unknown-to-its-workspace-0": metadata(home, workspace),
    }
    try:
        for name, said in others.items():
            asyncio.run(submit(name, said))
        asyncio.run(submit(orphan, metadata(home, workspace)))
        began = time.monotonic()
        wait_for_end(orphan, began)
        assert reconcile_once(platform.settings) == []
        assert not {"STOPPED", "FAILED"} & set(asyncio.run(statuses(*others)))
        assert JobState.of(workspace, "train", -1).read().closed
    finally:
        asyncio.run(stop(*others, orphan))
