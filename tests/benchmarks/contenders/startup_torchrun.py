"""The same training by `torchrun`, from its start to the first step."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipelines.run.progress import PROGRESS_FILE, ProgressReader
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.local_platform import wait_until


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    workspace = folder / "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "pipelines.training"]
    command += ["--recipe", str(folder / "recipe.yaml"), "--workspace", str(workspace)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run_round() -> tuple[float, dict[str, Any]]:
        (workspace / PROGRESS_FILE).unlink(missing_ok=True)
        progress = ProgressReader(workspace)

        def has_stepped() -> bool:
            return any(each.stage == "train" and each.done >= 1 for each in progress.read())

        began = time.time()
        with subprocess.Popen(command, env=environment) as process:
            seconds = wait_until(has_stepped, "the first step") - began
        if process.returncode:
            raise SystemExit(f"torchrun ended with code {process.returncode}")
        return 1.0, {"seconds": seconds}

    return run_round


if __name__ == "__main__":
    serve(prepare)
