"""A Ray of few nodes on the loopback, of one CPU each: token, and nothing else of the platform."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from pipelines.core.machine import free_port
from pipelines.core.settings import PROJECT, load_settings
from pipelines.orchestration.jobs_api import TokenFile
from pipelines.platform.environment import RAY_START_HOOK, client_variables

# A Ray that may have several nodes looks for 127.0.0.1 at the host's address: a job's agent would
# wait there for a GCS that listens on the loopback only. So every process but the one that joins a
# node, where Ray refuses it, is told of a Ray of one machine.
RAY_ON_THE_LOOPBACK = """
from ray._private import ray_constants, services
from ray.scripts import scripts
ray_constants.ENABLE_RAY_CLUSTER = True
services.resolve_ip_for_localhost = lambda host: host
scripts.main()
"""
NAMES = ("first", "second")
_START_LIMIT_S = 480


@dataclass(frozen=True)
class RayCluster:
    """What runs: `environment` leads a command to it."""

    environment: dict[str, str]
    metrics_urls: tuple[str, ...]  # a node's each


@contextmanager
def ray_cluster(folder: Path, names: Sequence[str] = NAMES) -> Iterator[RayCluster]:
    """The nodes, up; what they say goes to the folder, their sessions away with them."""
    token = folder / "ray-token"
    token.write_text("a-token-of-the-tests")
    variables = {
        "PENSTOCK_HOME": str(folder / "home"),
        "PENSTOCK_RAY_PORT": str(free_port()),
        "PENSTOCK_RAY_GCS_PORT": str(free_port()),
        "RAY_AUTH_TOKEN_PATH": str(token),
    }
    with _variables(variables):
        settings = load_settings()
        environment = dict(os.environ) | client_variables(settings)
    environment |= {
        "PYTHONPATH": str(PROJECT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_START_HOOK": RAY_START_HOOK,
        "AUTOSCALER_METRIC_PORT": "0",
        "DASHBOARD_METRIC_PORT": "0",
        "PENSTOCK_METRICS": "1",
    }
    gcs = settings.ray_gcs_port
    head = ["--head", f"--port={gcs}", "--dashboard-host=127.0.0.1"]
    head += [f"--dashboard-port={settings.ray_port}"]
    ports = [free_port() for _ in names]
    with ExitStack() as stack:
        # A socket's path may have 107 bytes, and pytest's folders are deep.
        sessions = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
        environment["RAY_TMPDIR"] = sessions
        for number, (name, port) in enumerate(zip(names, ports, strict=True), start=1):
            way = head if number == 1 else [f"--address=127.0.0.1:{gcs}"]
            options = [f"--node-name={name}", f"--metrics-export-port={port}", *way]
            stack.enter_context(_node(folder / f"{name}.log", environment, options))
            _wait_for_nodes(settings.ray_url, token, number, folder)
        yield RayCluster(environment, tuple(f"http://127.0.0.1:{port}/metrics" for port in ports))


@contextmanager
def _variables(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    for foreign in ("RAY_API_SERVER_ADDRESS", "MLFLOW_TRACKING_URI"):
        os.environ.pop(foreign, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _node(log: Path, environment: dict[str, str], options: Sequence[str]) -> Iterator[None]:
    command = [sys.executable, "-c", RAY_ON_THE_LOOPBACK, "start", "--block", *options]
    command += ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--disable-usage-stats"]
    command += ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
    with log.open("w") as file:
        node = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        try:
            yield
        finally:
            family = [psutil.Process(node.pid)]
            family += family[0].children(recursive=True)
            node.terminate()  # `ray start --block` ends what it started
            _, alive = psutil.wait_procs(family, timeout=20)
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            node.wait()


def _wait_for_nodes(url: str, token: Path, number: int, folder: Path) -> None:
    """A node is known once its agent listens, so that it can be given a job."""
    deadline = time.monotonic() + _START_LIMIT_S
    while _nodes(url, token) < number:
        logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
        assert time.monotonic() < deadline, f"node {number} did not come:\n{logs}"
        time.sleep(1)


def _nodes(url: str, token: Path) -> int:
    try:
        answer = httpx.get(
            f"{url}/api/v0/nodes?limit=100", auth=TokenFile(token), timeout=30, trust_env=False
        )
    except httpx.TransportError:
        return 0
    if not answer.is_success:
        return 0
    nodes = answer.json()["data"]["result"]["result"]
    return sum(node["state"] == "ALIVE" for node in nodes)
