"""A whole training job from the command line, in a workspace of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipelines.run.progress import PROGRESS_FILE, Progress
from tests.benchmarks.contender import Round, serve


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    workspace = folder / f"workspace-{options['module']}"
    environment = {
        **os.environ,
        "PENSTOCK_HOME": str(folder / "home"),
        "MLFLOW_TRACKING_URI": options["mlflow"],
        "OMP_NUM_THREADS": str(options["threads"]),
        "RAY_ADDRESS": "local",
    }
    own_ray = "import ray; ray.init()\n" if options["module"].startswith("ray_jobs.") else ""
    run = f"{own_ray}import runpy; runpy.run_module({options['module']!r}, run_name='__main__')"
    command = [sys.executable, "-c", run, "--recipe", str(folder / "recipe.yaml")]
    command += ["--workspace", str(workspace)]
    command += ["--set", f"train.checkpoint_every={options['checkpoint_every']}"]

    def run_round() -> tuple[float, dict[str, Any]]:
        shutil.rmtree(workspace, ignore_errors=True)
        subprocess.run(command, env=environment, check=True)
        lines = (workspace / PROGRESS_FILE).read_text().splitlines()
        points = [Progress.model_validate_json(line) for line in lines]
        last = next(each for each in reversed(points) if each.stage == "train" and each.rate)
        tokens = last.done * options["tokens_per_step"]
        return tokens, {"steps": last.done, "seconds": last.done / (last.rate or 1.0)}

    return run_round


if __name__ == "__main__":
    serve(prepare)
