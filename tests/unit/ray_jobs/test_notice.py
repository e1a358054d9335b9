"""SIGUSR1 to a job's own process."""

import os
import signal

import pytest

from pipelines.training.preemption import EXIT_BY_SIGTERM
from ray_jobs import notice


def test_the_signal_is_a_notice_within_the_block_and_of_this_try_alone() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    for _ in range(2):  # started anew
        with notice.listening_for_notice():
            assert not notice.asked()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert notice.asked()
    assert signal.getsignal(signal.SIGUSR1) == before
    assert not notice.asked()


def test_a_job_that_is_ended_by_two_signals_can_say_so() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with notice.listening_for_notice():
        pass
    assert signal.getsignal(signal.SIGTERM) == before
    try:
        with pytest.raises(SystemExit) as ended, notice.listening_for_notice():
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code not in (0, EXIT_BY_SIGTERM)  # it did not save
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
