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
    workspace = folder / f"workspace-{options['module']}-{options['ray']}"
    environment = {
        **os.environ,
        "PENSTOCK_HOME": str(folder / "home"),
        "MLFLOW_TRACKING_URI": options["mlflow"],
        "OMP_NUM_THREADS": str(options["threads"]),
        "RAY_ADDRESS": "local",
    }
    own_ray = "import ray; ray.init()\n" if options["ray"] else ""
    run = f"{own_ray}import runpy; runpy.run_module({options['module']!r}, run_name='__main__')"
    command = [sys.executable, "-c", run, "--recipe", str(folder / "recipe.yaml")]
    command += ["--workspace", str(workspace)]
    command += ["--set", f"train.checkpoint_every={options['checkpoint_every']}"]

    def run_round() -> tuple[float, dict[str, Any]]:
        shutil.rmtree(workspace, ignore_errors=True)
        subprocess.run(command, env=environment, check=True)
        lines = (workspace / PROGRESS_FILE).read_text().splitlines()
        points = [Progress.model_validate_json(line) for line in lines]
        first, *points = [each for each in points if each.stage == "train"]
        counted = [each for each in points if each.rate and each.done >= each.total / 2]
        steps = counted[-1].done - counted[0].done
        begun, ended = ((each.done - first.done) / each.rate for each in (counted[0], counted[-1]))
        return steps * options["tokens_per_step"], {"steps": steps, "seconds": ended - begun}

    return run_round


if __name__ == "__main__":
    serve(prepare)
