"""Row 22: another program takes the machine's memory while a run trains, and gives it back."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipelines.core.line_files import read_lines
from pipelines.core.settings import PROJECT
from pipelines.run.logbook import read_logbook
from pipelines.run.records import TrainRecord
from pipelines.stages.train.train_stage import HISTORY
from pipelines.training.checkpoint.store import CHECKPOINTS
from tests.faults.pipeline_run import until
from tests.faults.small_memory import small_memory
from tests.integration.test_elastic_workers import samples_of

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(" " in sys.executable, reason="Ray's own commands take no such path"),
]

JOB = """
import sys
import ray
from pipelines.stages.preprocess import preprocessing
from pipelines.stages.standalone import open_workspace, parse_job
from ray_jobs.train_on_ray import train_on_ray

job = parse_job("test", sys.argv[1:])
with open_workspace(job) as workspace:
    preprocessing.run(job.recipe, workspace)
    # Else it joins a cluster that another program has left a note of.
    ray.init("local", num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1")
    train_on_ray(job.recipe, workspace)
"""
STEPS, LOG_EVERY = 400, 10
LIMIT_S = 600
RECIPE = {
    "data.source.max_documents": 12,
    "train.steps": STEPS,
    "train.log_every": LOG_EVERY,
    "train.checkpoint_every": 20,
    "train.micro_batch_size": 2,
    "resources.workers": 1,
}
GIB = 2**30
MEMORY, THRESHOLD = 6 * GIB, 0.5  # Ray ends workers beyond 3 GiB, so that the kernel need not
OTHERS = int(2.75 * GIB)  # with Ray's own processes that is too much for any worker


@contextmanager
def job(start, workspace):
    """The training as a process, with a Ray of its own."""
    sets = [part for key, value in RECIPE.items() for part in ("--set", f"{key}={value}")]
    options = ["--recipe", "debug", "--workspace", str(workspace), *sets]
    with workspace.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [*start, sys.executable, "-c", JOB, *options],
            cwd=PROJECT,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "PENSTOCK_HOME": str(workspace.with_suffix(".home")),
                "RAY_memory_usage_threshold": str(THRESHOLD),
                "RAY_memory_monitor_refresh_ms": "100",
                "RAY_USAGE_STATS_ENABLED": "0",
            },
            stdout=log,
            stderr=log,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@contextmanager
def memory_taken(start):
    """Another program has it in the block."""
    code = "import sys; held = b'x' * int(sys.argv[1]); print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    command = [*start, sys.executable, "-c", code, str(OTHERS)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as program:
        assert program.stdout.readline()
        yield
        program.kill()


def points(folder: Path) -> list[dict]:
    return read_lines(folder / HISTORY, dict)


def shortages(workspace: Path) -> list[str]:
    return [each.done for each in read_logbook(workspace) if each.kind == "out of memory"]


def test_row_22_another_program_takes_the_memory(tmp_path, record_property):
    workspace = tmp_path / "run"
    with small_memory(MEMORY) as start, job(start, workspace) as process:

        def said() -> str:
            return workspace.with_suffix(".log").read_text()[-5000:]

        def goes_beyond(step: int) -> bool:
            assert process.poll() in (None, 0), said()
            return any(each["step"] > step for each in points(workspace / CHECKPOINTS))

        until(lambda: goes_beyond(50), "training", LIMIT_S)
        with memory_taken(start):
            until(lambda: len(shortages(workspace)) >= 2, "two tries that ran short", LIMIT_S)
            assert process.poll() is None, said()
        began, step = time.monotonic(), points(workspace / CHECKPOINTS)[-1]["step"]
        until(lambda: goes_beyond(step), "training after the shortage", LIMIT_S)
        record_property("recovered", json.dumps([round(time.monotonic() - began, 1)]))
        assert process.wait(LIMIT_S) == 0, said()
    first, second, *_ = shortages(workspace)
    assert first == "the next try takes micro-batches of 1"
    assert second == "the next try takes as much as this one, 15 s later"
    kinds = Counter(each.kind for each in read_logbook(workspace))
    assert kinds.keys() == {"start", "out of memory", "resume", "layout change", "end"}
    assert TrainRecord.read(workspace).layout["train.micro_batch_size"] == 1
    trained = points(workspace / "outputs" / "train")
    assert [each["step"] for each in trained] == list(range(LOG_EVERY, STEPS + 1, LOG_EVERY))
    assert [each["samples"] for each in trained] == samples_of(workspace, STEPS)
    checks = ["same samples in each step", "each shortage in the logbook, no worker lost"]
    record_property("checks", json.dumps(checks))
