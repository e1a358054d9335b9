"""A site's command for a Ray cluster of one run: `up` starts another head of this machine.

As KubeRay does, it starts the head again when it has ended, at the same address.
"""

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from pipelines.core.machine import free_port
from pipelines.core.settings import load_settings
from pipelines.orchestration.jobs_api import TokenFile
from pipelines.platform.environment import platform_environment, server_variables
from tests.faults.pipeline_run import until
from tests.faults.processes import kill_tree

LIMIT_S = 240


def main() -> None:
    """Do what the command line asks."""
    settings = load_settings()
    address = Path(os.environ["PENSTOCK_RAY_ADDRESS_FILE"])
    file = settings.home / f"cluster-of-{os.environ['PENSTOCK_RUN']}"
    if sys.argv[1] == "up" and not file.exists():
        port = free_port()
        file.write_text(str(start(port).pid))
        url = f"http://127.0.0.1:{port}"
        until(lambda: answers(url), "the run's cluster", LIMIT_S)
        address.write_text(f"{url}\n")
    elif sys.argv[1] == "down" and file.exists():
        with suppress(psutil.NoSuchProcess):
            kill_tree(psutil.Process(int(file.read_text())))
        file.unlink()


def start(port: int) -> subprocess.Popen[bytes]:
    """A head with a dashboard at this port; it lasts as long as the process."""
    settings, gcs = load_settings(), free_port()
    runtime = Path((settings.home / "services" / "runtime").read_text())
    options = [
        *("start", "--head", "--block", "--disable-usage-stats", "--num-cpus=2"),
        *("--node-ip-address=127.0.0.1", f"--port={gcs}", "--dashboard-host=127.0.0.1"),
        *(f"--dashboard-port={port}", "--dashboard-agent-listen-port=0"),
        *("--min-worker-port=0", "--max-worker-port=0"),
    ]
    ray = shlex.join([str(runtime / "venv/bin/python"), "-m", "ray.scripts.scripts", *options])
    own = runtime / f"own-{port}"
    own.mkdir()
    environment = platform_environment(settings) | server_variables(settings, runtime)
    environment |= {"RAY_ADDRESS": f"127.0.0.1:{gcs}", "RAY_TMPDIR": str(own)}
    with (settings.home / "services" / "run-cluster.log").open("a") as log:
        return subprocess.Popen(
            ["sh", "-c", f"while true; do {ray}; done"],
            env=environment,
            # A task's is a socket: bash, by which Ray starts jobs, would take it for a login.
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def answers(url: str) -> bool:
    """Whether a job could be submitted there."""
    token = TokenFile(load_settings().ray_token_path)
    try:
        answer = httpx.get(f"{url}/api/v0/nodes", auth=token, timeout=5, trust_env=False)
    except httpx.TransportError:
        return False
    return answer.is_success and "ALIVE" in answer.text


if __name__ == "__main__":
    main()
