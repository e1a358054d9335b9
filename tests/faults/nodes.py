"""A second node of the platform's Ray cluster, on the same machine."""

import itertools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from pipelines.core.settings import Settings
from pipelines.orchestration.jobs_api import TokenFile
from pipelines.platform.environment import platform_environment, server_variables
from tests.conftest import Platform
from tests.faults.pipeline_run import until
from tests.faults.processes import FIND_LIMIT_S, find, kill_tree

_numbers = itertools.count()  # of jobs that hold CPUs of the head: Ray is slow to forget one

# A Ray that may have several nodes puts the host's address in the place of 127.0.0.1.
_RAY_ON_THE_LOOPBACK = """
from ray._private import services
from ray.scripts import scripts
services.resolve_ip_for_localhost = lambda host: host
scripts.main()
"""


class Node:
    """A raylet of its own with one CPU, joined to the platform's cluster."""

    def __init__(self, platform: Platform) -> None:
        known, nodes = set(_raylets(platform)), alive(platform.settings)
        self._start = join(platform.settings, platform.runtime)
        self.raylet = find(
            platform, lambda each: each not in known and _is_raylet(each), "the second raylet"
        )
        # Until the cluster knows of it, a training that begins has no room there.
        until(lambda: alive(platform.settings) > nodes, "the second node", FIND_LIMIT_S)

    def close(self) -> None:
        """End what is left of it."""
        with suppress(psutil.NoSuchProcess):
            kill_tree(psutil.Process(self._start.pid))
        self._start.wait()


def alive(settings: Settings) -> int:
    """How many nodes Ray has."""
    answer = httpx.get(
        f"{settings.ray_url}/api/v0/nodes",
        params={"limit": 100},
        auth=TokenFile(settings.ray_token_path),
        timeout=30,
        trust_env=False,
    )
    nodes = answer.raise_for_status().json()["data"]["result"]["result"]
    return sum(node["state"] == "ALIVE" for node in nodes)


def join(settings: Settings, runtime: Path) -> subprocess.Popen[bytes]:
    """Start a raylet with one CPU; it lasts as long as the process."""
    options = [
        f"--address=127.0.0.1:{settings.ray_gcs_port}",
        "--node-ip-address=127.0.0.1",
        "--num-cpus=1",
        "--dashboard-agent-listen-port=0",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--disable-usage-stats",
        "--block",
    ]
    with (settings.home / "services" / "second-node.log").open("a") as log:
        return subprocess.Popen(
            [runtime / "venv" / "bin" / "python", "-c", _RAY_ON_THE_LOOPBACK, "start", *options],
            env=platform_environment(settings)
            | server_variables(settings, runtime)
            | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"},  # the platform's Ray is of one node
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


@contextmanager
def second_node(platform: Platform) -> Iterator[Node]:
    """The head has one free CPU in the block, and another node has one: two workers need both."""
    with _one_free_cpu(platform):
        node = Node(platform)
        try:
            yield node
        finally:
            node.close()


@contextmanager
def _one_free_cpu(platform: Platform) -> Iterator[None]:
    """All CPUs of the head but one belong to a job that sleeps."""
    settings = platform.settings
    token = settings.ray_token_path.read_text(encoding="utf-8").strip()
    with httpx.Client(
        base_url=f"{settings.ray_url}/api",
        headers={"Authorization": f"Bearer {token}"},
        timeout=60,
        trust_env=False,
    ) as ray:
        blocker, cpus = f"blocker-{next(_numbers)}", psutil.cpu_count() or 1
        body = {
            "submission_id": blocker,
            "entrypoint": "sleep 3600",
            "entrypoint_num_cpus": max(2, cpus) - 1,
        }
        ray.post("/jobs/", json=body).raise_for_status()
        try:
            until(
                lambda: ray.get(f"/jobs/{blocker}").json()["status"] == "RUNNING",
                "the job that holds the head's CPUs",
                FIND_LIMIT_S,
            )
            yield
        finally:
            ray.post(f"/jobs/{blocker}/stop").raise_for_status()
            until(
                lambda: ray.get(f"/jobs/{blocker}").json()["status"] == "STOPPED",
                "the end of the job that holds the head's CPUs",
                FIND_LIMIT_S,
            )


def _raylets(platform: Platform) -> list[psutil.Process]:
    return [each for each in platform.processes() if _is_raylet(each)]


def _is_raylet(process: psutil.Process) -> bool:
    return process.name() == "raylet"
