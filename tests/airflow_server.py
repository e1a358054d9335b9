"""A real api-server of Airflow by itself."""

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from pipelines.platform.environment import BIN


@contextmanager
def api_server(url: str, environment: Mapping[str, str], home: Path) -> Iterator[None]:
    """Serve the tables that the environment names, until the block ends; its log is in `home`."""
    log = home / "api-server.log"
    with log.open("w") as output:
        command = [BIN / "airflow", "api-server"]
        server = psutil.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                httpx.get(f"{url}/api/v2/monitor/health", timeout=5, trust_env=False)
                break
            except httpx.TransportError:
                in_time = server.is_running() and time.monotonic() < deadline
                assert in_time, log.read_text()[-3000:]
                time.sleep(0.5)
        yield
    finally:
        for each in (*server.children(recursive=True), server):
            each.kill()
        server.wait()
