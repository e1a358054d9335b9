"""Row 21: a Ray head and two nodes with addresses of their own, S3 on a fourth; a link is cut."""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

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
            "AWS_ENDPOINT_URL": f"http://{hosts.address(STORE)}:{S3_PORT}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "PYTHONPATH": str(PROJECT),
        }
        hosts.environment, hosts.folder = environment, tmp_path
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


def train(hosts: Hosts, workspace: Path) -> subprocess.Popen[bytes]:
    """Begin a training, from the head's host."""
    sets = [part for key, value in RECIPE.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "tests.faults.network_job", "--recipe", "debug", *sets]
    command += ["--workspace", str(workspace)]
    return hosts.start(HEAD, command, hosts.environment, hosts.folder / "job.log")


def history(workspace: Path) -> list[dict]:
    return read_lines(workspace / CHECKPOINTS / HISTORY, dict)


def test_row_21_a_link_is_cut(hosts, tmp_path, record_property):
    workspace = tmp_path / "run"
    job = train(hosts, workspace)

    def goes_beyond(step: int) -> None:
        def beyond() -> bool:
            assert job.poll() in (None, 0), (tmp_path / "job.log").read_text()[-5000:]
            points = history(workspace)
            return bool(points) and points[-1]["step"] > step

        until(beyond, f"training beyond step {step}", START_LIMIT_S)

    recovered = []
    goes_beyond(100)
    with hosts.cut(SECOND):
        time.sleep(AWAY_S)
    began = time.monotonic()
    goes_beyond(history(workspace)[-1]["step"] + 20)
    recovered.append(time.monotonic() - began)
    with hosts.cut(SECOND):
        began, at = time.monotonic(), history(workspace)[-1]["step"]
        goes_beyond(at + 20)
        recovered.append(time.monotonic() - began)
        code = job.wait(END_LIMIT_S)
    assert code == 0, (tmp_path / "job.log").read_text()[-5000:]
    points = history(workspace)
    assert [point["step"] for point in points] == list(range(10, STEPS + 1, 10))
    assert {point["tokens"] / point["step"] for point in points} == {8 * 64}
    assert TrainRecord.read(workspace).steps == STEPS
    record_property("recovered", json.dumps([round(each, 1) for each in recovered]))
    record_property("checks", json.dumps(["success", "each step once, of the same batch"]))
