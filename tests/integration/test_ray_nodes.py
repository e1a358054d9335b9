"""What the product does over the nodes of a Ray: the doctor, and the figures for Prometheus."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import yaml

from pipelines.core.machine import free_port
from pipelines.core.settings import PROJECT
from tests.conftest import PENSTOCK
from tests.integration.ray_cluster import NAMES, RayCluster, ray_cluster
from tests.unit.infra.test_monitoring import QUERIES, metrics_in, metrics_of_gpus

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
from ray_jobs.train_on_ray import _reporter
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
    until = tmp_path / "until"
    (tmp_path / "training.py").write_text(TRAINING)
    with (tmp_path / "training.log").open("w") as log, prometheus(cluster, tmp_path) as url:
        training = subprocess.Popen(
            [sys.executable, tmp_path / "training.py", until, tmp_path],
            cwd=PROJECT,
            env=cluster.environment,
            stdout=log,
            stderr=log,
        )
        try:
            _wait_for_figures(url, {query for query in QUERIES if _has_figures(query)}, training)
            mfu = figures(url, "last_over_time(ray_penstock_train_mfu[10m])")
            assert {query for query in QUERIES if figures(url, query) is None} == set()
        finally:
            until.touch()
            training.wait(LIMIT_S)
    assert training.returncode == 0, (tmp_path / "training.log").read_text()[-3000:]
    (told,) = mfu or ()  # by one of the two workers
    assert told["metric"]["run"] == "a-run"
    assert float(told["value"][1]) == 0.5


@contextmanager
def prometheus(cluster: RayCluster, folder: Path) -> Iterator[str]:
    """A real one by the file that Compose mounts, but for the nodes' addresses."""
    program = shutil.which("prometheus")
    if not program:
        pytest.skip("no Prometheus is installed (on Debian: apt-get install prometheus)")
    config = yaml.safe_load((PROJECT / "infra" / "monitoring" / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [urlsplit(u).netloc for u in cluster.metrics_urls]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen(
            [program, *options, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
        try:
            yield f"http://{address}"
        finally:
            server.terminate()
            server.wait()


def figures(url: str, query: str) -> list[dict[str, Any]] | None:
    """The series that a query gives; None: Prometheus does not understand it."""
    found = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=30, trust_env=False)
    answer = found.json()
    return answer["data"]["result"] if answer["status"] == "success" else None


def _has_figures(query: str) -> bool:
    """Whether a Ray without GPUs tells what it asks for, and Airflow nothing of it."""
    asked = metrics_in(query)
    return all(name[:4] == "ray_" for name in asked) and not (
        asked & metrics_of_gpus() or 'Name="GPU"' in query
    )


def _wait_for_figures(url: str, queries: set[str], training: subprocess.Popen[bytes]) -> None:
    """Nothing has to wait just now: any state is as good as the one that a panel counts."""
    missing = {re.sub(r'State="\w+"', 'State!=""', query) for query in queries}
    deadline = time.monotonic() + LIMIT_S
    while missing:
        assert training.poll() is None, f"training ended with {training.returncode}"
        assert time.monotonic() < deadline, f"{missing}: nothing after {LIMIT_S} s"
        time.sleep(2)
        with suppress(httpx.TransportError):  # it starts
            missing = {query for query in missing if not figures(url, query)}


def test_a_node_with_a_problem_of_its_own_takes_no_more_work(cluster: RayCluster) -> None:
    """The last test of these nodes: one of them ends."""
    (raylet,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if "--node-name=second" in (process.info["cmdline"] or ())
        and process.info["cmdline"][0].endswith("/raylet")
    )
    too_few = 2048  # files, for what it starts from now on; the doctor asks for 4096
    raylet.rlimit(psutil.RLIMIT_NOFILE, (too_few, too_few))
    examined = subprocess.run(
        [PENSTOCK, "doctor", "--fence", "--json", "--recipe", "debug"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    parts = json.loads(examined.stdout)["parts"]
    states = {name: {each["check"]: each["state"] for each in parts[name]} for name in parts}
    assert states["node second (127.0.0.1)"]["open files"] == "problem"
    assert states["node second (127.0.0.1)"]["fence"] == "warning"
    assert "fence" not in states["node first (127.0.0.1)"]
    raylet.wait(LIMIT_S)  # as nothing runs there
