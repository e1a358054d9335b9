"""A node is lost: Ray Train goes on with the workers that are left, on the same batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT

# A cluster of its own, in a process of its own; its second node dies under the training.
JOB = """
import contextlib, sys, threading, time

import ray
from ray.cluster_utils import Cluster

from pipelines.core.storage import read_json
from pipelines.stages import preprocess
from pipelines.stages.standalone import open_workspace, parse_job
from ray_jobs import train

job = parse_job("test", sys.argv[1:])
held = contextlib.ExitStack()
workspace = held.enter_context(open_workspace(job))
preprocess.run(job.recipe, workspace)
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.connect()  # before there is another node, which the driver must not depend on
second = cluster.add_node(num_cpus=1)

def workers():
    return read_json(workspace / "layout.json")["layout"]["parallel.dp_replicate"]

def lose_a_node():
    while len(history.read_text().splitlines() if history.is_file() else []) < 3:
        time.sleep(0.1)
    print("workers", workers(), flush=True)
    cluster.remove_node(second, allow_graceful=False)

history = workspace / "checkpoints" / "history.jsonl"
threading.Thread(target=lose_a_node, daemon=True).start()
train.train_on_ray(job.recipe, workspace)
print("workers", workers(), flush=True)
ray.shutdown()
cluster.shutdown()
held.close()
"""
RECIPE = [
    "data.source.max_documents=12",
    "train.steps=300",
    "train.log_every=10",
    "train.checkpoint_every=10",
    "resources.workers=[1, 2]",
]


@pytest.mark.parity
@pytest.mark.skipif(" " in sys.executable, reason="Ray's own test cluster takes no such path")
def test_a_lost_node_costs_a_worker_and_no_sample(tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    sets = [part for each in RECIPE for part in ("--set", each)]
    done = subprocess.run(
        [sys.executable, "-c", JOB, "--recipe", "debug", "--workspace", str(workspace), *sets],
        cwd=PROJECT,
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "PENSTOCK_HOME": str(tmp_path / "home"),
            # Until Ray knows of the node's death, it waits for a worker there.
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "40",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("workers ")]
    assert lines == [["workers", "2"], ["workers", "1"]]
    points = (workspace / "outputs" / "train" / "history.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in points]
    assert [point["step"] for point in found] == list(range(10, 301, 10))
    # The batch is the same, whatever the number of workers.
    assert {point["tokens"] / point["step"] for point in found} == {8 * 64}
    assert found[-1]["loss"] < found[2]["loss"]
