"""Train workers on the platform's Ray are told to go, or killed: the same bits, each thing once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.core.line_files import read_lines
from pipelines.core.settings import PROJECT
from pipelines.run.logbook import read_logbook
from pipelines.run.records import TrainRecord
from tests.arithmetic import make_guesser, reinforced
from tests.conftest import Platform
from tests.processor_time import limit

STEPS, LOG_EVERY = 600, 5
SETS = {
    "data.source.max_documents": 12,
    "train.steps": STEPS,
    "train.log_every": LOG_EVERY,
    "train.checkpoint_every": 50,
    "resources.workers": 2,
}


class Training:
    """A driver on the platform's cluster, as a user's shell would start it."""

    def __init__(self, platform: Platform, workspace: Path, overrides: list[str]) -> None:
        self.platform = platform
        self.workspace = workspace
        options = ["--recipe", "debug", "--workspace", str(workspace)]
        for each in overrides:
            options += ["--set", each]
        self._log = (workspace.parent / f"{workspace.name}.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ray_jobs.train", *options],
            env=platform.environment | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"},
            cwd=PROJECT,
            stdout=self._log,
            stderr=self._log,
        )

    @property
    def history(self) -> list[dict[str, Any]]:
        """The curve so far."""
        path = self.workspace / "checkpoints" / "history.jsonl"
        return read_lines(path, dict[str, Any])

    @property
    def step(self) -> int:
        """The last one reported."""
        return self.history[-1]["step"] if self.history else 0

    def wait(self, found: Callable[[], Any], what: str, seconds: float = 300) -> Any:
        """Until it is there; the driver must live."""
        deadline = time.monotonic() + seconds
        while not (result := found()):
            assert self.process.poll() is None, f"the driver ended: {self.log()}"
            assert time.monotonic() < deadline, f"{what} took over {seconds:.0f} s: {self.log()}"
            time.sleep(0.02)
        return result

    def worker(self, rank: int) -> psutil.Process:
        """The process that trains as a rank has its file for stacks open."""
        file = str(self.workspace / "diagnostics" / "heartbeats" / f"rank-{rank}.stacks.txt")
        return self.wait(lambda: self._find(lambda each: _has_open(each, file)), f"rank {rank}")

    def sampler(self) -> psutil.Process:
        """Of the answers that a model learns from; it is at work."""
        return self.wait(
            lambda: self._find(lambda each: "ray::_Actor.answer" in " ".join(each.cmdline())),
            "a sampler",
        )

    def end(self) -> TrainRecord:
        """Wait for success."""
        assert self.process.wait(300) == 0, self.log()
        self._log.close()
        return TrainRecord.read(self.workspace)

    def log(self) -> str:
        """Its last lines."""
        return Path(self._log.name).read_text(errors="replace")[-5000:]

    def _find(self, fits: Callable[[psutil.Process], bool]) -> psutil.Process | None:
        for process in self.platform.processes():
            with suppress(psutil.Error, IndexError):
                if fits(process):
                    return process
        return None


def _has_open(process: psutil.Process, file: str) -> bool:
    return any(each.path == file for each in process.open_files())


@pytest.fixture
def start(platform: Platform, tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Begin a training in a workspace of that name, or go on with it."""
    started: list[Training] = []

    def begin(name: str, overrides: list[str] | None = None) -> Training:
        usual = [f"{key}={value}" for key, value in SETS.items()]
        started.append(Training(platform, tmp_path / name, overrides or usual))
        return started[-1]

    yield begin
    for training in started:
        training.process.kill()
        training.process.wait()


def gone(process: psutil.Process) -> bool:
    """Whether it has ended, though its parent may not have looked yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_the_same_bits_whatever_is_killed(
    start: Callable[[str], Training], platform_variables: Platform
) -> None:
    from pipelines.tracking.mlflow_client import open_client

    reference = start("unhurt").end()
    hurt = start("hurt")

    hurt.wait(lambda: hurt.step >= 60, "step 60")
    told = hurt.worker(rank=1)
    at, began = hurt.step, time.monotonic()
    told.send_signal(signal.SIGTERM)  # to one worker only, not to rank 0
    hurt.wait(lambda: gone(told), "the end of a worker that was told to go", limit(30))
    assert time.monotonic() - began < limit(30)
    hurt.wait(lambda: hurt.step > at + 60, "going on after SIGTERM")

    hurt.worker(rank=0).send_signal(signal.SIGKILL)
    record = hurt.end()

    assert record.model_hash == reference.model_hash
    counts = Counter(entry.kind for entry in read_logbook(hurt.workspace))
    assert counts == {
        "start": 1,
        "preemption": 1,
        "worker lost": 1,
        "resume": 2,
        "end": 1,
    }
    preempted, *_ = [e for e in read_logbook(hurt.workspace) if e.kind == "preemption"]
    assert f"SIGTERM to process {told.pid}" in preempted.cause
    resumed = [e for e in read_logbook(hurt.workspace) if e.kind == "resume"]
    assert resumed[0].step == preempted.step  # nothing was lost
    assert resumed[0].worker_hours_lost == 0
    assert resumed[1].worker_hours_lost is not None

    run_id = json.loads((hurt.workspace / "run.json").read_text())["mlflow_run_id"]
    client = open_client()
    for curve in ("train/loss", "train/tokens_per_second"):
        steps = [point.step for point in client.get_metric_history(run_id, curve)]
        assert steps == list(range(LOG_EVERY, STEPS + 1, LOG_EVERY))


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_with_copies_in_memory_a_death_without_notice_costs_a_step_at_most(
    start: Callable[..., Training],
) -> None:
    asked = SETS | {"train.log_every": 1, "train.checkpoint_every": 10_000, "train.steps": 400}
    plain = start("unhurt", [f"{key}={value}" for key, value in asked.items()]).end()
    copied = [f"{key}={value}" for key, value in (asked | {"train.copy_every": 1}).items()]
    hurt = start("hurt", copied)
    for rank, step in enumerate((60, 120)):
        hurt.wait(lambda: hurt.step >= step, f"step {step}")  # noqa: B023
        hurt.worker(rank).send_signal(signal.SIGKILL)
        done = hurt.step
        resumes = rank + 1
        hurt.wait(lambda: len(resumed(hurt.workspace)) == resumes, "going on")  # noqa: B023
        assert resumed(hurt.workspace)[-1] >= done - 1
    record = hurt.end()
    assert record.model_hash == plain.model_hash
    left = Path("/dev/shm") / f"penstock-{os.getuid()}"
    assert not any(left.rglob("*.safetensors"))


def resumed(workspace: Path) -> list[int | None]:
    """The steps that training went on after."""
    return [entry.step for entry in read_logbook(workspace) if entry.kind == "resume"]


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
def test_learning_from_rewards_ends_in_the_same_bits_whatever_is_killed(
    start: Callable[..., Training], tmp_path: Path, ahead: bool
) -> None:
    asked = [
        *reinforced(tmp_path, make_guesser(tmp_path)),
        "train.steps=80",
        "train.log_every=2",
        "train.checkpoint_every=10",
        "reinforcement.samplers=1",
        f"reinforcement.ahead={ahead}",
    ]
    reference = start("unhurt", asked).end()
    hurt = start("hurt", asked)
    hurt.wait(lambda: hurt.step >= 6, "step 6")
    killed = hurt.sampler()
    killed.send_signal(signal.SIGKILL)
    at = hurt.step
    hurt.wait(lambda: hurt.step > at + 6, "going on with another sampler")
    assert hurt.sampler().pid != killed.pid
    assert {entry.kind for entry in read_logbook(hurt.workspace)} == {"start"}

    hurt.wait(lambda: hurt.step >= 24, "step 24")
    hurt.worker(rank=0).send_signal(signal.SIGKILL)
    hurt.wait(lambda: hurt.step >= 44, "going on after the trainer's death")

    hurt.process.send_signal(signal.SIGKILL)
    hurt.process.wait()
    again = start("hurt", asked)
    record = again.end()
    assert record.model_hash == reference.model_hash
    kinds = [entry.kind for entry in read_logbook(again.workspace)]
    assert kinds.count("resume") == 2
    assert "worker lost" in kinds


def test_a_job_that_is_stopped_saves_nothing(start: Callable[[str], Training]) -> None:
    """As `stop_job` does it: the driver dies, and Ray ends its workers by SIGTERM and SIGKILL."""
    stopped = start("stopped")
    stopped.wait(lambda: stopped.step >= 60, "step 60")
    workers = [stopped.worker(rank) for rank in (0, 1)]
    began = time.monotonic()
    os.kill(stopped.process.pid, signal.SIGKILL)
    while not all(map(gone, workers)):
        assert time.monotonic() - began < 3, "workers live 3 s after the end of their driver"
        time.sleep(0.02)
    kinds = {entry.kind for entry in read_logbook(stopped.workspace)}
    assert kinds == {"start"}
    saved = [int(path.parent.name[5:]) for path in stopped.workspace.rglob("COMPLETE")]
    assert all(step % SETS["train.checkpoint_every"] == 0 for step in saved)
