"""A run that is told to end saves and goes on to the same bits; what is told in vain is not."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipelines.training import preemption
from pipelines.training.checkpoint.store import CheckpointStore
from pipelines.training.preemption import PreemptedError
from tests.unit.training.conftest import Noted
from tests.unit.training.test_recovery import NAN, Poisoned
from tests.unit.training.test_trainer import same_weights


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_NOTICE_S", 0.0)


def told_after(run: Any, step: int) -> Noted:
    """Let the run be told to end as the report of a step is made, and train."""
    run.trainer.events = noted = Noted()
    report = run.trainer.report

    def tell(metrics: Any) -> None:
        report(metrics)
        if metrics.step == step:
            preemption.ask("a test")

    run.trainer.report = tell
    with pytest.raises(PreemptedError, match="a test"):
        run.trainer.fit()
    return noted


@pytest.mark.parametrize("settings", [{}, {"log_every": 5}, {"checkpoint_every": 100}])
def test_it_goes_on_to_the_same_bits(
    start: Callable, tmp_path: Any, settings: dict[str, int]
) -> None:
    whole = start("whole", **settings)
    whole.trainer.fit()
    first = start("cut", **settings)
    noted = told_after(first, 5)
    store = CheckpointStore(tmp_path / "cut")
    saved = store.steps()[-1]
    assert 5 < saved <= 7  # the wish travels with the next step, and is looked at one later
    assert noted.kinds == ["preemption"]
    assert noted.entries[0]["step"] == saved
    second = start("cut", **settings)
    second.trainer.fit()
    assert same_weights(whole.model, second.model)
    points = {p.step: p.curve_point() for p in (*first.points, *second.points)}
    assert list(points.values()) == [p.curve_point() for p in whole.points]


def test_a_checkpoint_that_is_being_written_is_enough(start: Callable, tmp_path: Any) -> None:
    run = start(checkpoint_every=1)
    told_after(run, 5)
    assert run.trainer.checkpoints.newest == CheckpointStore(tmp_path / "checkpoints").steps()[-1]


def test_bad_steps_that_are_to_be_undone_are_not_saved(start: Callable, tmp_path: Any) -> None:
    poison = dict.fromkeys(range(4, 100), NAN)
    run = Poisoned(start(max_bad_steps=2, log_every=4, checkpoint_every=4, steps=100), poison).run
    noted = told_after(run, 4)
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [4]
    assert "not saved; the run goes on after step 4" in noted.entries[0]["done"]


def test_the_end_of_a_run_is_not_broken_off(start: Callable) -> None:
    run = start()
    report = run.trainer.report

    def tell(metrics: Any) -> None:
        report(metrics)
        if metrics.step == 9:
            preemption.ask("too late")

    run.trainer.report = tell
    assert run.trainer.fit().step == 10


def test_what_is_followed_by_a_kill_is_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_NOTICE_S", 0.2)
    with preemption.listening():
        preemption.ask("a test")
        assert preemption.asked() is None
        time.sleep(0.25)
        assert preemption.asked()
    with preemption.listening():
        assert preemption.asked() is None


def test_another_thread_may_ask_and_waits_for_the_end(start: Callable, tmp_path: Any) -> None:
    assert not preemption.save_and_end("nothing trains", 1)
    run = start(steps=100_000, log_every=1)
    run.trainer.events = noted = Noted()
    ended: list[bool] = []

    def ask() -> None:
        while not run.points:  # before the first step nothing trains yet
            time.sleep(0.01)
        ended.append(preemption.save_and_end("other workers", 9))

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(PreemptedError, match="other workers: saved in"):
        run.trainer.fit()
    asking.join()
    assert ended == [True]
    assert CheckpointStore(tmp_path / "checkpoints").steps()[-1] == run.points[-1].step
    assert noted.kinds == []  # that there are other workers is noted as they begin


@pytest.fixture
def quiet_process() -> Iterator[Callable[[str], subprocess.Popen]]:
    """A process that listens for SIGTERM and then runs some code."""
    started: list[subprocess.Popen] = []

    def begin(code: str) -> subprocess.Popen:
        head = "import time; from pipelines.training import preemption; preemption.listen()\n"
        process = subprocess.Popen(
            [sys.executable, "-c", head + code], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_sigterm_is_a_notice_while_a_run_trains_and_the_end_else(
    quiet_process: Callable[[str], subprocess.Popen],
) -> None:
    idle = quiet_process("print('ready', flush=True); time.sleep(60)")
    idle.send_signal(signal.SIGTERM)
    assert idle.wait(10) == -signal.SIGTERM
    code = (
        "with preemption.listening():\n"
        "    print('ready', flush=True)\n"
        "    while not (notice := preemption.asked()): time.sleep(0.01)\n"
        "    print(notice.reason)\n"
    )
    training = quiet_process(code)
    training.send_signal(signal.SIGTERM)
    told, _ = training.communicate(timeout=10)
    assert training.returncode == 0
    assert told.startswith(f"SIGTERM to process {training.pid} on {os.uname().nodename}")
