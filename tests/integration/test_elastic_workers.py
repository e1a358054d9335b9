"""A node is lost and another one comes: fewer workers go on, then more, on the same batches."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.token_dataset import TokenDataset
from pipelines.recipe.recipe_files import load_recipe, override_values
from pipelines.run.logbook import read_logbook
from pipelines.run.records import PreprocessRecord
from tests.integration.own_cluster_job import needs_a_path_for_ray, run_job

# A cluster of its own, in a process of its own; its second node dies under the training, and later
# there is another one.
JOB = """
import contextlib, sys, threading, time

import ray
from ray.cluster_utils import Cluster

from pipelines.core.storage import read_json
from pipelines.stages.preprocess import preprocessing
from pipelines.stages.standalone import open_workspace, parse_job
from ray_jobs import train_on_ray

job = parse_job("test", sys.argv[1:])
held = contextlib.ExitStack()
workspace = held.enter_context(open_workspace(job))
preprocessing.run(job.recipe, workspace)
# Its own hooks at exit are signal handlers, which a thread can't set as it adds a node.
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1}, shutdown_at_exit=False)
held.callback(cluster.shutdown)
held.callback(ray.shutdown)
cluster.connect()  # before there is another node, which the driver must not depend on
second = cluster.add_node(num_cpus=1)

def workers():
    return read_json(workspace / "layout.json")["layout"]["parallel.dp_replicate"]

def points():
    return len(history.read_text().splitlines() if history.is_file() else [])

def lose_a_node_and_get_another():
    while points() < 3:
        time.sleep(0.1)
    print("workers", workers(), flush=True)
    cluster.remove_node(second, allow_graceful=False)
    while workers() == 2:
        time.sleep(0.1)
    print("workers", workers(), flush=True)
    cluster.add_node(num_cpus=1)

history = workspace / "checkpoints" / "history.jsonl"
train_on_ray.RESIZE_INTERVAL_S = 5.0
threading.Thread(target=lose_a_node_and_get_another, daemon=True).start()
with held:
    train_on_ray.train_on_ray(job.recipe, workspace)
    print("workers", workers(), flush=True)
"""
RECIPE = [
    "data.source.max_documents=12",
    "train.steps=4000",
    "train.log_every=10",
    "train.checkpoint_every=100",
    "resources.workers=[1, 2]",
]


@pytest.mark.parity
@needs_a_path_for_ray
@pytest.mark.timeout(700)
def test_a_lost_node_costs_a_worker_and_no_sample_and_another_gives_one(tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    # Until Ray knows of the node's death, it waits for a worker there.
    variables = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "40"}
    said = run_job(JOB, workspace, RECIPE, variables, seconds=600)
    lines = [line.split() for line in said.splitlines() if line.startswith("workers ")]
    assert lines == [["workers", "2"], ["workers", "1"], ["workers", "2"]]
    points = (workspace / "outputs" / "train" / "history.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in points]
    assert [point["step"] for point in found] == list(range(10, 4001, 10))
    # The batch is the same, whatever the number of workers.
    assert {point["tokens"] / point["step"] for point in found} == {8 * 64}
    assert found[-1]["loss"] < found[2]["loss"]
    assert [point["samples"] for point in found] == samples_of(workspace, 4000)
    entries = read_logbook(workspace)
    assert Counter(entry.kind for entry in entries) == {
        "start": 1,
        "node lost": 1,
        "resume": 2,
        "workers changed": 2,
        "end": 1,
    }
    changes = [entry.cause for entry in entries if entry.kind == "workers changed"]
    assert changes == ["2 → 1 workers", "1 → 2 workers"]
    # Before there were more they saved, so nothing was made again.
    more = [entry for entry in entries if entry.kind == "resume"][1]
    assert more.worker_hours_lost == 0


def samples_of(workspace: Path, steps: int) -> list[str]:
    """What one process alone would have trained on, step by step."""
    recipe = override_values(load_recipe("debug"), {"data.source.max_documents": 12})
    dataset = PreprocessRecord.read(workspace).dataset
    loader = TokenLoader(
        TokenDataset(
            workspace / "outputs" / "preprocess",
            dataset.train,
            64,
            packed_length=dataset.packed_length,
        ),
        seed=recipe.seed,
        global_batch=8,
        micro_batch=1,
        dp_rank=0,
        dp_world=1,
        device=torch.device("cpu"),
    )
    return [loader.digest(range(first, first + 10)) for first in range(0, steps, 10)]
