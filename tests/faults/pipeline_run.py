"""One run of the pipeline, followed closely enough to be hurt at the right moment."""

import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pipelines.core.line_files import read_lines
from pipelines.platform.airflow_api import AirflowApi
from pipelines.platform.dag_runs import DAG
from pipelines.run.logbook import Kind, read_logbook
from pipelines.run.records import RUN_FILE, TrainRecord, record_path
from pipelines.run.workspace import Run, workspace_path
from pipelines.stages.train.train_stage import HISTORY
from pipelines.training.checkpoint.store import CHECKPOINTS
from tests.conftest import Platform

T = TypeVar("T")

RECIPE = "debug"
# Short steps, and enough of them to be hit in the middle.
STEPS, LOG_EVERY, CHECKPOINT_EVERY = 900, 5, 20
TRAINING = {
    "train.steps": STEPS,
    "train.log_every": LOG_EVERY,
    "train.checkpoint_every": CHECKPOINT_EVERY,
    "evaluate.bias.enabled": "false",
    "evaluate.safety.documents": 0,
    "evaluate.sample_tokens": 0,
}
MIDDLE = 4 * CHECKPOINT_EVERY  # a step with checkpoints behind it
SEED = "SEED"  # the variable of the seed of the moments; without it a run is hurt at MIDDLE
START_LIMIT_S = 240.0  # until a stage of a healthy platform has begun
END_LIMIT_S = 480.0

# It is in the key of *train* in the stage cache, and decides nothing about the weights.
_stall_seconds = itertools.count(601)


def until(found: Callable[[], T | None], what: str, seconds: float, every: float = 0.2) -> T:
    """What `found` gives once that is something; AssertionError after too long."""
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(every)
    return result


class PipelineRun:
    """A DAG run of `llm_pipeline`, whose train stage is never in the stage cache.

    Attributes:
        expected: How many entries of each kind the faults so far must have left in the logbook.
        recoveries: Seconds from each fault to when the work that it hit went on.
    """

    def __init__(self, platform: Platform, model: str, **changes: Any) -> None:
        """Start it; a model name of its own lets each run's gate decide for itself."""
        self.platform = platform
        self.model = model
        self.airflow = AirflowApi(platform.settings)
        values = TRAINING | {
            "train.stall_seconds": next(_stall_seconds),
            "register.model_name": model,
        }
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        self.values = values
        moment = random.Random(f"{os.environ.get(SEED)} {model}")
        steps = range(2 * CHECKPOINT_EVERY, self.steps // 2)
        self._middle = moment.choice(steps) if SEED in os.environ else MIDDLE
        sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        done = platform.penstock("run", "--no-wait", "--json", "--recipe", RECIPE, *sets)
        assert done.returncode == 0, done.stderr
        self.run_id: str = json.loads(done.stdout)["dag_run_id"]
        self.workspace = workspace_path(platform.settings.runs, self.run_id)
        self.expected: dict[Kind, int] = {}
        self.recoveries: list[float] = []

    @property
    def steps(self) -> int:
        """Of the whole training."""
        return int(self.values["train.steps"])

    @property
    def history(self) -> list[dict[str, float]]:
        """The training curve so far; a line that is being written is left out."""
        return read_lines(self.workspace / CHECKPOINTS / HISTORY, dict[str, Any])

    @property
    def step(self) -> int:
        """The last step that is in the history."""
        points = self.history
        return int(points[-1]["step"]) if points else 0

    @property
    def told(self) -> set[Kind]:
        """The kinds of what its logbook has."""
        return {entry.kind for entry in read_logbook(self.workspace)}

    @property
    def facts(self) -> Run:
        """Its `run.json`."""
        return Run.read(self.workspace)

    @cached_property
    def trained(self) -> TrainRecord:
        """What *train* made, read once."""
        return TrainRecord.read(self.workspace)

    def has_result(self, stage: str) -> bool:
        """Whether a stage wrote its record."""
        return record_path(self.workspace, stage).is_file()

    def task(self, task_id: str) -> dict[str, Any]:
        """A task instance as Airflow's API has it."""
        return self.airflow.tasks(DAG, self.run_id).get(task_id, {})

    def task_state(self, task_id: str) -> str | None:
        """Such as `running`, `deferred` or `success`."""
        state: str | None = self.task(task_id).get("state")
        return state

    @property
    def state(self) -> str:
        """`queued`, `running`, `success` or `failed`."""
        return self.airflow.run_state(DAG, self.run_id)

    def wait(
        self, found: Callable[[], T | None], what: str, seconds: float, every: float = 0.2
    ) -> T:
        """`until`; a run that ends or waits too long shows its logs."""
        try:
            return until(found, f"{what} of {self.run_id}", seconds, every)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def wait_for_step(self, step: int | None = None) -> None:
        """Until training is so far, by default at this run's own moment."""
        step = step or self._middle
        self.wait(lambda: self.step >= step, f"step {step}", START_LIMIT_S, every=0.05)
        assert not self.has_result("train"), "training was over before it could be hurt"

    def wait_for_task(self, task_id: str, *states: str, seconds: float = START_LIMIT_S) -> None:
        """Until a task is in one of the states."""
        self.wait(lambda: self.task_state(task_id) in states, f"{task_id} as {states}", seconds)

    def wait_for_end(self) -> str:
        """The final state."""
        over = ("success", "failed")
        self.wait(lambda: self.state in over, "the end", END_LIMIT_S, every=1)
        return self.state

    @contextmanager
    def fault(
        self, kind: Kind, goes_on: Callable[[], bool] | None = None, entries: int = 1
    ) -> Iterator[None]:
        """A fault is injected in the block; afterwards the run must go on by itself.

        Args:
            kind: Of what the fault must leave in the logbook.
            goes_on: Whether the work goes on; without one, training passed the step that it was at.
            entries: How many it leaves; one for each part that it hit.
        """
        yield
        began, step = time.monotonic(), self.step
        self.expected[kind] = self.expected.get(kind, 0) + entries
        found = goes_on or (lambda: self.step > step or self.has_result("train"))
        self.wait(found, f"going on after '{kind}' at step {step}", START_LIMIT_S)
        self.recoveries.append(time.monotonic() - began)

    def logs(self) -> str:
        """The ends of all that a user would look at."""
        home = self.platform.settings.home
        logs = [log for log in (home / "airflow/logs").rglob("*.log") if self.run_id in str(log)]
        logs += [self.workspace / name for name in ("logbook.jsonl", "error.log", "error.json")]
        logs += sorted(self.platform.runtime.rglob("job-driver-*.log"), key=_modified)[-2:]
        logs += [home / "services" / f"{part}.log" for part in ("ray", "mlflow", "scheduler")]
        return "\n".join(f"--- {log}\n{_end(log)}" for log in logs if log.is_file())

    def is_open(self) -> bool:
        """Whether its workspace is there, with its MLflow run."""
        return (self.workspace / RUN_FILE).is_file() and self.facts.mlflow_run_id is not None


def _end(log: Path, length: int = 3000) -> str:
    return log.read_text(errors="replace")[-length:]


def _modified(path: Path) -> float:
    return path.stat().st_mtime
