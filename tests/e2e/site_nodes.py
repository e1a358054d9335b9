"""A site's command for nodes of one run: `up` joins a raylet of this machine, `down` ends it."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from pipelines.core.settings import load_settings
from tests.faults.nodes import alive, join
from tests.faults.pipeline_run import until
from tests.faults.processes import kill_tree

LIMIT_S = 120


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
