"""Rows 21, 31 and 32: a Ray head and two nodes with addresses of their own, S3 on a fourth.

A link is cut, a link carries one way only, and names can't be resolved.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from pipelines.core.line_files import read_lines
from pipelines.core.settings import PROJECT
from pipelines.run.records import TrainRecord
from pipelines.stages.train.train_stage import HISTORY
from pipelines.training.checkpoint.store import CHECKPOINTS
from tests.faults.pipeline_run import END_LIMIT_S, START_LIMIT_S, until
from tests.hosts import Hosts

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(" " in sys.executable, reason="Ray's own commands take no such path"),
]

HEAD, FIRST, SECOND, STORE = 1, 2, 3, 4
GCS_PORT, S3_PORT = 6379, 5000
AWAY_S = 30
STEPS = 1500
RECIPE = {
    "train.steps": STEPS,
    "train.log_every": 10,
    "train.checkpoint_every": 50,
    "train.checkpoints": "s3://checkpoints/run",
    "resources.workers": "[1, 2]",
}


@pytest.fixture
def hosts(tmp_path):
    """The cluster on its network, and an empty bucket."""
    token = tmp_path / "ray-token"
    token.write_text(secrets.token_hex(32))
    with Hosts(4) as hosts:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PENSTOCK_HOME": str(tmp_path / "home"),
            "RAY_ADDRESS": f"{hosts.address(HEAD)}:{GCS_PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            # On a busy machine a node takes longer to start.
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_agent_register_timeout_ms": "300000",
            "AWS_ENDPOINT_URL": f"http://store.test:{S3_PORT}",
            "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true",  # moto takes `store` for a bucket
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "PYTHONPATH": str(PROJECT),
        }
        hosts.environment, hosts.folder = environment, tmp_path
        hosts.ask_for_names(hosts.address(STORE))
        hosts.names = serve_names(hosts)
        store = ["-m", "moto.server", "--host", hosts.address(STORE), "--port", str(S3_PORT)]
        hosts.start(STORE, [sys.executable, *store], environment, tmp_path / "store.log")
        start(hosts, HEAD, "--head", f"--port={GCS_PORT}", "--num-cpus=0")
        for node in (FIRST, SECOND):
            # A node that the cluster gave up joins it anew, as a supervisor has it do.
            start(hosts, node, f"--address={environment['RAY_ADDRESS']}", "--num-cpus=1")
        make_bucket = "import boto3; boto3.client('s3').create_bucket(Bucket='checkpoints')"
        until(
            lambda: (
                hosts.start(
                    HEAD, [sys.executable, "-c", make_bucket], environment, tmp_path / "bucket.log"
                ).wait()
                == 0
            ),
            "the object store",
            60,
        )
        yield hosts


def start(hosts: Hosts, host: int, *options: str) -> None:
    """Ray on a host, again and again."""
    ray = f"'{sys.executable}' -m ray.scripts.scripts start --block --disable-usage-stats"
    address = f"--node-ip-address={hosts.address(host)}"
    loop = f"while true; do {ray} {address} {' '.join(options)}; sleep 1; done"
    hosts.start(host, ["bash", "-c", loop], hosts.environment, hosts.folder / f"host{host}.log")


def serve_names(hosts: Hosts) -> subprocess.Popen[bytes]:
    """The name server, on the store's host."""
    command = [sys.executable, "-m", "tests.name_server", *[hosts.address(STORE)] * 2]
    return hosts.start(STORE, command, hosts.environment, hosts.folder / "names.log")


def train(hosts: Hosts, workspace: Path) -> subprocess.Popen[bytes]:
    """Begin a training, from the head's host."""
    sets = [part for key, value in RECIPE.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "tests.faults.network_job", "--recipe", "debug", *sets]
    command += ["--workspace", str(workspace)]
    return hosts.start(HEAD, command, hosts.environment, hosts.folder / "job.log")


def history(workspace: Path) -> list[dict]:
    return read_lines(workspace / CHECKPOINTS / HISTORY, dict)


class Job:
    """A training that is hurt."""

    def __init__(self, hosts: Hosts, workspace: Path) -> None:
        """Begin it."""
        self.workspace, self._log = workspace, hosts.folder / "job.log"
        self.recovered: list[float] = []
        self.checks: list[str] = []
        self._process = train(hosts, workspace)

    @property
    def step(self) -> int:
        """The last one of the history."""
        points = history(self.workspace)
        return int(points[-1]["step"]) if points else 0

    def goes_beyond(self, step: int) -> None:
        """Wait for it."""

        def beyond() -> bool:
            assert self._process.poll() in (None, 0), self._log.read_text()[-5000:]
            return self.step > step

        until(beyond, f"training beyond step {step}", START_LIMIT_S)

    def goes_on(self) -> None:
        """Wait for more than what was under way, and note how long that took."""
        began = time.monotonic()
        self.goes_beyond(self.step + 20)
        self.recovered.append(time.monotonic() - began)

    def ends_well(self) -> None:
        """Wait for its end; each step was done once, of the same batch."""
        assert self._process.wait(END_LIMIT_S) == 0, self._log.read_text()[-5000:]
        points = history(self.workspace)
        assert [point["step"] for point in points] == list(range(10, STEPS + 1, 10))
        assert {point["tokens"] / point["step"] for point in points} == {8 * 64}
        assert TrainRecord.read(self.workspace).steps == STEPS
        self.checks = ["success", "each step once, of the same batch"]


@pytest.fixture
def job(hosts, tmp_path, record_property):
    """A training with checkpoints behind it; what was seen of it goes to the table."""
    job = Job(hosts, tmp_path / "run")
    job.goes_beyond(100)
    yield job
    record_property("recovered", json.dumps([round(each, 1) for each in job.recovered]))
    record_property("checks", json.dumps(job.checks))


def test_row_21_a_link_is_cut(hosts, job):
    away_and_gone(job, lambda: hosts.cut(SECOND))


def test_row_31_a_link_carries_one_way_only(hosts, job):
    away_and_gone(job, lambda: hosts.mute(SECOND))


def away_and_gone(job: Job, fault: Callable[[], AbstractContextManager[None]]) -> None:
    """First it heals, and then it does not."""
    with fault():
        time.sleep(AWAY_S)
    job.goes_on()
    with fault():
        job.goes_on()
        job.ends_well()


def test_row_32_no_name_is_resolved(hosts, job):
    """A worker dies meanwhile, too, and the next one finds no checkpoints."""
    hosts.names.kill()
    hosts.names.wait()
    pids = [pid for host in (FIRST, SECOND) for pid in hosts.processes(host)]
    workers = [pid for pid in pids if "RayTrainWorker" in " ".join(psutil.Process(pid).cmdline())]
    os.kill(workers[0], signal.SIGKILL)
    time.sleep(AWAY_S)
    serve_names(hosts)
    job.goes_on()
    job.ends_well()
