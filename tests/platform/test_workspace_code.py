"""Stage code comes from the run's workspace, in every process of a Ray job."""

import asyncio
import json
import time

import pytest

from pipelines.core.settings import PROJECT
from pipelines.orchestration.jobs_api import Job, JobsApi
from pipelines.orchestration.ray_job import job_command
from pipelines.recipe.recipe_files import load_recipe
from pipelines.stage_cache.open_workspace import open_workspace
from tests.conftest import Platform

PROBE = """
import json, tempfile
from pathlib import Path

import ray
import ray.train
from ray.train.torch import TorchTrainer


def constant(*_):
    from pipelines.run.progress import PROGRESS_FILE

    return PROGRESS_FILE


def in_train_worker():
    Path(HERE, "train_worker.txt").write_text(constant())


HERE = str(Path.cwd())
ray.init()
rows = ray.data.from_items([{"x": 1}]).map(lambda row: {"constant": constant()}).take_all()
storage = ray.train.RunConfig(storage_path=tempfile.mkdtemp())
TorchTrainer(
    in_train_worker, scaling_config=ray.train.ScalingConfig(num_workers=1), run_config=storage
).fit()
seen = {
    "driver": constant(),
    "data task": rows[0]["constant"],
    "train worker": Path("train_worker.txt").read_text(),
}
Path("seen.json").write_text(json.dumps(seen))
"""


async def run_job(platform: Platform, submission_id: str, entrypoint: str, variables) -> Job:
    async with JobsApi(platform.settings.ray_url, platform.settings.ray_token_path) as jobs:
        for _ in range(2):  # a second walker attaches
            await jobs.submit(submission_id, entrypoint, {"env_vars": variables}, {})
        deadline = time.monotonic() + 300
        while (job := await jobs.get(submission_id)).live and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        return job


@pytest.fixture
def workspace(platform_variables):
    recipe = load_recipe("debug")
    return open_workspace(PROJECT, platform_variables.settings.home, "probe", recipe, {})


def test_driver_data_tasks_and_train_workers_import_from_the_clone(platform_variables, workspace):
    module = workspace / "pipelines/run/progress.py"
    module.write_text(module.read_text().replace("progress.jsonl", "changed.jsonl"))
    (workspace / "probe.py").write_text(PROBE)

    entrypoint, variables = job_command(workspace, "python -m probe")
    job = asyncio.run(run_job(platform_variables, "probe-0", entrypoint, variables))

    assert job.status == "SUCCEEDED", job.message
    seen = json.loads((workspace / "seen.json").read_text())
    assert seen == dict.fromkeys(["driver", "data task", "train worker"], "changed.jsonl")


def test_a_job_that_nobody_knows_is_absent_and_can_be_stopped(platform_variables):
    settings = platform_variables.settings

    async def ask():
        async with JobsApi(settings.ray_url, settings.ray_token_path) as jobs:
            await jobs.stop("never-submitted")
            return await jobs.get("never-submitted")

    assert asyncio.run(ask()) is None
