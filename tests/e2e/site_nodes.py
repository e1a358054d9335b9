"""A site's command for nodes of one run: `up` joins a raylet of this machine, `down` ends it."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from pipelines.core.settings import Settings, load_settings
from pipelines.orchestration.jobs_api import TokenFile
from tests.faults.nodes import join
from tests.faults.pipeline_run import until
from tests.faults.processes import kill_tree

LIMIT_S = 120


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


def main() -> None:
    """Do what the command line asks."""
    settings = load_settings()
    file = settings.home / f"node-of-{os.environ['PENSTOCK_RUN']}"
    if sys.argv[1] == "up" and not file.exists():
        runtime = Path((settings.home / "services" / "runtime").read_text())
        file.write_text(str(join(settings, runtime).pid))
        until(lambda: alive(settings) > 1, "the node", LIMIT_S)
    elif sys.argv[1] == "down" and file.exists():
        with suppress(psutil.NoSuchProcess):
            kill_tree(psutil.Process(int(file.read_text())))
        until(lambda: alive(settings) == 1, "the node's end", LIMIT_S)
        file.unlink()


if __name__ == "__main__":
    main()
