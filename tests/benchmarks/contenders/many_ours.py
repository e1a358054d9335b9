"""Many runs at once of a DAG with one Ray job."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.contender import Round, serve
from tests.benchmarks.local_platform import connect

DAG = "many"
PARTS = ("scheduler", "triggerer")
FIRST = 0.2  # of the runs are over when these count as warm


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    settings, airflow = connect(DAG)
    pids = _pids()
    parts = {part: psutil.Process(pids[part]) for part in PARTS}

    def memory() -> dict[str, int]:
        return {part: process.memory_info().rss for part, process in parts.items()}

    def over(names: list[str]) -> int:
        runs = {run.run_id: run.state for run in airflow.runs() if run.dag_id == DAG}
        if failed := [name for name in names if runs.get(name) == "failed"]:
            raise SystemExit(f"failed: {failed}")
        return sum(runs.get(name) == "success" for name in names)

    def run_round() -> tuple[float, dict[str, Any]]:
        folder = settings.home / f"many-{time.time_ns()}"
        names = [f"{folder.name}-{number}" for number in range(options["runs"])]
        for name in names:
            (folder / name).mkdir(parents=True)
        began, warm = time.monotonic(), {}
        for name in names:
            airflow.trigger(DAG, name, {"workspace": str(folder / name)})
        while (done := over(names)) < len(names):
            if not warm and done >= FIRST * len(names):
                warm = memory()
            time.sleep(2)
        seconds = time.monotonic() - began
        written = (folder / "done").read_text().split()
        if len(written) != len(names) or len(set(written)) != len(names):
            raise SystemExit(f"{len(names)} runs, {len(written)} jobs: {len(set(written))} names")
        growth = {f"{part} growth": rss / warm[part] for part, rss in memory().items()}
        return float(len(names)), {"seconds": seconds, **growth}

    return run_round


def _pids() -> dict[str, int]:
    command = [Path(sys.prefix) / "bin" / "penstock", "status", "--json"]
    said = subprocess.run(command, env=os.environ, capture_output=True, check=False).stdout
    return {each["name"]: each["pid"] for each in json.loads(said)["parts"]}


if __name__ == "__main__":
    serve(prepare)
