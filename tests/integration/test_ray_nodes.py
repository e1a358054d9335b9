"""What the product does over the nodes of a Ray: the doctor, and the figures for Prometheus."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from pipelines.core.settings import PROJECT
from tests.conftest import PENSTOCK
from tests.integration.ray_cluster import NAMES, RayCluster, ray_cluster
from tests.unit.infra.test_monitoring import DASHBOARDS, metrics_of_gpus, named

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(" " in sys.executable, reason="Ray's own commands take no such path"),
]

TRAINING = """
import sys, time
from pathlib import Path
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray_jobs.train import _reporter
from tests.unit.infra.test_monitoring import POINT

def work(config):
    _reporter("a-run")(POINT)
    while not Path(config["until"]).exists():
        time.sleep(0.2)

ray.init(log_to_driver=False)
DataParallelTrainer(
    work,
    train_loop_config={"until": sys.argv[1]},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=sys.argv[2]),
).fit()
"""
LIMIT_S = 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray")) as running:
        yield running


def test_the_doctor_looks_at_each_node_and_between_them(cluster: RayCluster) -> None:
    examined = subprocess.run(
        [PENSTOCK, "doctor", "--json", "--recipe", "debug"],
        env=cluster.environment | {"PENSTOCK_NETWORK_PLANES": "users=lo"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    parts = json.loads(examined.stdout)["parts"]
    nodes = {f"node {name} (127.0.0.1)" for name in NAMES}
    assert parts.keys() == {"this machine", "services", "between nodes"} | nodes
    for node in nodes:
        seen = {finding["check"]: finding for finding in parts[node]}
        assert seen.keys() >= {"open files", "clock", "disk speed", "all-reduce", "network planes"}
        assert seen["network planes"]["saw"].startswith("users (lo)")
    between = {finding["check"]: finding for finding in parts["between nodes"]}
    assert f"2 nodes alike: ray {version('ray')}" in between["versions over nodes"]["saw"]
    assert between["clocks over nodes"]["saw"].startswith("2 clocks within")
    assert "over 2 processes (gloo) of 2 nodes" in between["all-reduce over nodes"]["saw"]
    carried = between["planes between nodes"]["saw"]
    assert re.match(
        r"users: TCP carried .* GiB/s from (first|second) .* to (first|second)", carried
    )
    assert {finding["state"] for finding in between.values()} == {"ok"}


def test_prometheus_finds_what_the_dashboards_ask_for(cluster: RayCluster, tmp_path: Path) -> None:
    asked = {metric for board in DASHBOARDS for metric in named(board) if metric[:4] == "ray_"}
    until = tmp_path / "until"
    (tmp_path / "training.py").write_text(TRAINING)
    with (tmp_path / "training.log").open("w") as log:
        training = subprocess.Popen(
            [sys.executable, tmp_path / "training.py", until, tmp_path],
            cwd=PROJECT,
            env=cluster.environment,
            stdout=log,
            stderr=log,
        )
        try:
            scraped = _scrape_for(cluster, asked - metrics_of_gpus(), training)
        finally:
            until.touch()
            training.wait(LIMIT_S)
    assert training.returncode == 0, (tmp_path / "training.log").read_text()[-3000:]
    told = set(re.findall(r"^ray_penstock_train_mfu\{.*$", scraped, re.MULTILINE))
    (line,) = told  # by one of the two workers
    assert 'run="a-run"' in line
    assert float(line.split()[-1]) == 0.5


def _scrape_for(cluster: RayCluster, names: set[str], training: subprocess.Popen[bytes]) -> str:
    """All that both nodes told until each of these was told; a gauge goes when it is not set."""
    deadline, scraped = time.monotonic() + LIMIT_S, ""
    while missing := names - set(re.findall(r"^(ray_\w+)", scraped, re.MULTILINE)):
        assert training.poll() is None, f"training ended with {training.returncode}"
        assert time.monotonic() < deadline, f"{missing} is not there after {LIMIT_S} s"
        time.sleep(2)
        for url in cluster.metrics_urls:
            scraped += httpx.get(url, timeout=30, trust_env=False).raise_for_status().text
    return scraped
