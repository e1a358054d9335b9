"""A training alone on a disk: `python -m pipelines.training`, without a platform."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.core.line_files import read_lines
from pipelines.core.settings import PROJECT
from pipelines.run.records import TrainRecord
from pipelines.stages.train.train_stage import HISTORY
from pipelines.training.checkpoint.store import CHECKPOINTS
from tests.conftest import PENSTOCK

STEPS, LOG_EVERY = 300, 5
RECIPE = {
    "data.source.max_documents": 12,
    "train.steps": STEPS,
    "train.log_every": LOG_EVERY,
    "train.checkpoint_every": 10,
    "resources.workers": 1,
}
LIMIT_S = 600


class Training:
    """The run of one recipe in a home, which the same command begins and goes on with."""

    def __init__(
        self, home: Path, variables: Mapping[str, str] | None = None, **changes: Any
    ) -> None:
        self._home = home
        values = RECIPE | {key.replace("__", "."): value for key, value in changes.items()}
        self._sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        own = {"PENSTOCK_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self._environment = os.environ | own | dict(variables or {})
        self.said = ""  # by the processes so far, to their ends

    @contextmanager
    def process(self, start: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
        """A process of it, which is killed with the block if it has not ended."""
        command = [*start, sys.executable, "-m", "pipelines.training", "--recipe", "debug"]
        # Not into the home: a full disk, or one that is gone, would keep the words.
        with subprocess.Popen(
            [*command, *self._sets],
            cwd=PROJECT,
            env=self._environment,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                yield process
            finally:
                process.kill()
                self.said += process.communicate()[1]

    def finish(self) -> None:
        """Run to the end, which is a success."""
        with self.process() as process:
            self.said += process.communicate(timeout=LIMIT_S)[1]
        assert process.returncode == 0, self.said[-5000:]

    @property
    def workspace(self) -> Path | None:
        """Its folder, once there is one."""
        return next((self._home / "runs").glob("ad-hoc-*"), None)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Its curve so far; a line that is being written is left out."""
        if self.workspace is None:
            return []
        return read_lines(self.workspace / CHECKPOINTS / HISTORY, dict[str, Any])

    def model(self) -> str:
        """The hash of the weights; each step was taken, and is in the curve, once."""
        assert self.workspace is not None
        curve = self.workspace / "outputs" / "train" / HISTORY
        steps = [json.loads(line)["step"] for line in curve.read_text().splitlines()]
        assert steps == list(range(LOG_EVERY, STEPS + 1, LOG_EVERY)), steps
        return TrainRecord.read(self.workspace).model_hash

    def why(self) -> list[str]:
        """What `penstock why` says of it."""
        assert self.workspace is not None
        done = subprocess.run(
            [PENSTOCK, "why", self.workspace.name],
            cwd=PROJECT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()
