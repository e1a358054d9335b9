"""A training job on the platform's Ray, begun warm or cold, or going on after a worker's death."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from pipelines.core.settings import load_settings
from pipelines.platform import warm_python
from pipelines.platform.supervisor import processes_of
from pipelines.run.progress import ProgressReader
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.local_platform import wait_until

WORKER = "ray::RayTrainWorker"
_KILL_AT = 45  # the step: two checkpoints are there


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    workspace = folder / f"workspace-{options['kill']}-{options['warm']}"
    command = [sys.executable, "-m", "ray_jobs.train", "--recipe", str(folder / "recipe.yaml")]
    command += ["--workspace", str(workspace)]

    def run_round() -> tuple[float, dict[str, Any]]:
        shutil.rmtree(workspace / "checkpoints", ignore_errors=True)
        progress = ProgressReader.at_end(workspace)
        if not options["warm"]:
            _end_warm_python()

        def has_come_to(step: int) -> bool:
            return any(each.stage == "train" and each.done >= step for each in progress.read())

        began = time.time()
        with _job(command):
            if options["kill"]:
                wait_until(lambda: has_come_to(_KILL_AT), f"step {_KILL_AT}")
                began = time.time()
                _workers()[-1].kill()
                time.sleep(0.3)  # the other one's last line, which may be on its way
                list(progress.read())
            stepped = wait_until(lambda: has_come_to(1), "the next step")
        return 1.0, {"seconds": stepped - began}

    return run_round


@contextmanager
def _job(command: list[str]) -> Iterator[None]:
    """A job, ended with the block; its workers end with it."""
    with subprocess.Popen(command, env=os.environ) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGKILL)
    wait_until(lambda: not _workers(), "the workers' end", 60)


def _workers() -> list[psutil.Process]:
    """Of this platform's Ray."""
    return [each for each in _processes() if _title(each).startswith(WORKER)]


def _end_warm_python() -> None:
    """End the server of forks; a new one comes up for the workers after the next ones."""
    for each in _processes():
        if f"{warm_python.__file__} --serve" in _title(each):
            each.kill()


def _processes() -> list[psutil.Process]:
    runtime = Path((load_settings().home / "services" / "runtime").read_text())
    return list(processes_of(runtime))


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


if __name__ == "__main__":
    serve(prepare)
