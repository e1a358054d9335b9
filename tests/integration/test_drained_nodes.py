"""A node that is to go is drained: training saves, goes on elsewhere, and has lost no step."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT
from pipelines.run.logbook import Entry, read_logbook
from pipelines.run.records import TrainRecord
from tests.integration.own_cluster_job import needs_a_path_for_ray, run_job

pytestmark = [
    pytest.mark.parity,
    needs_a_path_for_ray,
    pytest.mark.timeout(2400),
]

# A cluster of its own, in a process of its own; each node has a CPU, and the driver is on the
# first. A thread does what the test has put in the place of BEFALLS.
JOB = """
import contextlib, os, socket, subprocess, sys, threading, time, traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipelines.run.logbook import read_logbook
from pipelines.stages.preprocess import preprocessing
from pipelines.stages.standalone import open_workspace, parse_job
from pipelines.training.preemption import PreemptedError
from ray_jobs import train_on_ray, train_overseer
from tests.metadata_service import metadata_service

class NoFailure(train_overseer.Progress):
    def failed(self, cause):
        raise train_overseer.FruitlessError(cause)

train_overseer.Progress = NoFailure
work = train_on_ray._work

def with_bad_hardware(config):
    from pipelines.loading.dataloader import TokenLoader
    from pipelines.training import corruption, stragglers

    os.environ["LOCAL_RANK"] = "0"  # each node is a machine, and they have one address here
    if "SLOW_HOST" in os.environ:
        micro_batches = TokenLoader.micro_batches

        def late(self, step):
            time.sleep(0.1)
            return micro_batches(self, step)

        TokenLoader.micro_batches = late
    host = os.environ.get("SLOW_HOST", "fast")
    socket.gethostname = lambda: host  # all nodes are on this one
    stragglers.TOO_LONG_S = 1.0
    check = corruption.Corruption.forward_backward

    def flip(gradient):
        gradient.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
        return gradient

    def checked(self, step, batches, passes):
        is_wrong = "WRONG_HARDWARE" in os.environ and self.is_due(step)
        handle = self._model.parameters()[0].register_hook(flip) if is_wrong else None
        try:
            return check(self, step, batches, passes)
        finally:
            if handle is not None:
                handle.remove()

    corruption.Corruption.every = 20
    corruption.Corruption.forward_backward = checked
    return work(config)

train_on_ray._work = with_bad_hardware

def get_on(resumes):
    def points():
        return len(history.read_text().splitlines() if history.is_file() else [])

    while [entry.kind for entry in read_logbook(workspace)].count("resume") < resumes:
        time.sleep(0.1)
    before = points()
    while points() < before + 6:
        time.sleep(0.1)

def drain(node):
    ray_command = Path(sys.executable).parent / "ray"
    options = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    options += ["--address", cluster.address, "--node-id", node.node_id]
    options += ["--deadline-remaining-seconds", "120"]
    subprocess.run([ray_command, "drain-node", *options], check=True)

@ray.remote(num_cpus=1)
class Holder:
    def ready(self):
        pass

def hold(node):
    place = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    holder = Holder.options(scheduling_strategy=place).remote()
    ray.get(holder.ready.remote())
    return holder

def befall():
    try:
        BEFALLS
    except BaseException:
        traceback.print_exc()
        os._exit(1)

job = parse_job("test", sys.argv[1:])
with contextlib.ExitStack() as held:
    workspace = held.enter_context(open_workspace(job))
    history = workspace / "checkpoints" / "history.jsonl"
    preprocessing.run(job.recipe, workspace)
    service = held.enter_context(metadata_service())
    # Its own hooks at exit are signal handlers, which a thread can't set as it adds a node.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1}, shutdown_at_exit=False)
    held.callback(cluster.shutdown)
    held.callback(ray.shutdown)
    cluster.connect()
    told = {"PENSTOCK_NOTICE": "aws", "AWS_EC2_METADATA_SERVICE_ENDPOINT": service.url}
    nodes = [cluster.add_node(num_cpus=1, env_vars=each) for each in [NODES][:MORE_NODES]]
    holders = [hold(node) for node in nodes[FREE:]]  # while others have it, there is no room there
    threading.Thread(target=befall, daemon=True).start()
    try:
        train_on_ray.train_on_ray(job.recipe, workspace)
    except PreemptedError as ended:
        print(f"ended: {ended}")
"""
RECIPE = [
    "data.source.max_documents=12",
    "train.steps=600",
    "train.log_every=5",
    "train.checkpoint_every=100000",  # what a run goes on from is what it saved as it was told
]


def run(
    workspace: Path,
    workers: str,
    *befalls: str,
    more_nodes: int = 0,
    free: int = 1,  # of these
    nodes: str = "told, {}, {}",
    sets: Sequence[str] = (),
) -> str:
    """Train, while that befalls the cluster; what is printed."""
    job = JOB.replace("BEFALLS", "\n        ".join(befalls or ("pass",)))
    places = {"MORE_NODES": str(more_nodes), "FREE": str(free), "NODES": nodes}
    for place, content in places.items():
        job = job.replace(place, content)
    variables = {
        "PYTHONPATH": str(PROJECT),
        # On a busy machine a node takes longer to start.
        "RAY_raylet_start_wait_time_s": "300",
        "RAY_agent_register_timeout_ms": "300000",
    }
    values = [*RECIPE, f"resources.workers={workers}", *sets]
    return run_job(job, workspace, values, variables, seconds=900)


def nothing_lost(workspace: Path, causes: list[str]) -> None:
    """Each notice was told once, and training went on from the very step."""
    entries = read_logbook(workspace)
    counts = {"start": 1, "preemption": len(causes), "resume": len(causes), "end": 1}
    assert Counter(entry.kind for entry in entries) == counts
    told, resumed = of_kind(entries, "preemption"), of_kind(entries, "resume")
    for entry, after, cause in zip(told, resumed, causes, strict=True):
        assert cause in entry.cause
        assert after.step == entry.step
        assert after.worker_hours_lost == 0


def of_kind(entries: list[Entry], kind: str) -> list[Entry]:
    return [entry for entry in entries if entry.kind == kind]


def test_a_clouds_notice_and_a_drain_cost_no_step_and_no_bit(tmp_path: Path) -> None:
    run(tmp_path / "unhurt", "2", more_nodes=1)
    run(
        tmp_path / "hurt",
        "2",
        "get_on(0)",
        "ray.kill(holders[0])",
        "end = datetime.now(UTC) + timedelta(seconds=120)",
        "service.action = {'action': 'terminate', 'time': f'{end:%Y-%m-%dT%H:%M:%SZ}'}",
        "get_on(1)",
        "cluster.remove_node(nodes[0], allow_graceful=False)",  # which is no fault any more
        "ray.kill(holders[1])",
        "drain(nodes[1])",
        "get_on(2)",
        "cluster.remove_node(nodes[1], allow_graceful=False)",
        more_nodes=3,
    )
    causes = ["AWS will terminate this machine", "is drained, and has 1"]
    nothing_lost(tmp_path / "hurt", causes)
    hurt, unhurt = TrainRecord.read(tmp_path / "hurt"), TrainRecord.read(tmp_path / "unhurt")
    assert hurt.model_hash == unhurt.model_hash
    assert hurt.metrics == unhurt.metrics


def test_the_drivers_own_node(tmp_path: Path) -> None:
    run(tmp_path / "unhurt", "1")
    said = run(tmp_path / "hurt", "1", "get_on(0)", "drain(cluster.head_node)")
    assert "of rank 0 is drained, and has 1" in said.partition("ended: step ")[2]
    run(tmp_path / "hurt", "1")  # a job that is started anew, on another cluster
    nothing_lost(tmp_path / "hurt", ["of rank 0 is drained"])
    hurt, unhurt = TrainRecord.read(tmp_path / "hurt"), TrainRecord.read(tmp_path / "unhurt")
    assert hurt.model_hash == unhurt.model_hash


def test_a_node_whose_bits_are_wrong_again_and_again_is_left(tmp_path: Path) -> None:
    sets = ["train.steps=60", "train.checkpoint_every=15", "train.global_batch_size=6"]
    sets += ["train.micro_batch_size=2"]
    run(tmp_path / "unhurt", "3", more_nodes=2, free=2, nodes="{}, {}", sets=sets)
    wrong = "{'WRONG_HARDWARE': '1'}, {}, {}"
    is_found = "'corruption' in [entry.kind for entry in read_logbook(workspace)]"
    befalls = f"while not {is_found}: time.sleep(0.1)", "ray.kill(holders[0])"
    run(tmp_path / "hurt", "3", *befalls, more_nodes=3, free=2, nodes=wrong, sets=sets)
    entries = read_logbook(tmp_path / "hurt")
    (found,) = of_kind(entries, "corruption")
    assert re.search("wrong bits in gradient of rank [012] ", found.cause)
    assert found.done.startswith("its node takes no more work")
    assert [entry.step for entry in of_kind(entries, "resume")] == [15]
    hurt, unhurt = TrainRecord.read(tmp_path / "hurt"), TrainRecord.read(tmp_path / "unhurt")
    assert hurt.model_hash == unhurt.model_hash


def test_a_node_that_holds_the_others_up_is_left_and_no_step_is_lost(tmp_path: Path) -> None:
    run(tmp_path / "unhurt", "2", more_nodes=1)
    is_found = "any('no more work' in entry.done for entry in read_logbook(workspace))"
    befalls = f"while not {is_found}: time.sleep(0.1)", "ray.kill(holders[0])"
    slow = "{'SLOW_HOST': 'slow'}, {}"
    run(tmp_path / "hurt", "2", *befalls, more_nodes=2, nodes=slow)
    entries = read_logbook(tmp_path / "hurt")
    named, left = of_kind(entries, "slow rank")
    assert re.match(r"rank [01] on slow \(CPU\) is slow since step \d+: data takes", named.cause)
    assert re.match(r"rank [01] on slow \(CPU\) has held the others up for \d+ s", left.cause)
    (saved,), (resumed,) = of_kind(entries, "preemption"), of_kind(entries, "resume")
    assert resumed.step == saved.step < 600
    hurt, unhurt = TrainRecord.read(tmp_path / "hurt"), TrainRecord.read(tmp_path / "unhurt")
    assert hurt.model_hash == unhurt.model_hash
