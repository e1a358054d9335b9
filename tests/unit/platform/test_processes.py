"""Processes are known by what they inherited, and ended whoever their parent is."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipelines.platform import supervisor
from pipelines.platform.supervisor import end_processes, processes_of


def test_an_orphan_of_ours_is_ended_and_a_stranger_is_not(tmp_path: Path) -> None:
    environment = os.environ | {"PENSTOCK_RUNTIME": str(tmp_path)}
    with subprocess.Popen(["sleep", "60"]) as stranger:
        # `Popen` returns when the child is the new program, which goes on as an orphan.
        code = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        ours = processes_of(tmp_path)
        assert len(ours) == 1
        end_processes(ours)
        assert not processes_of(tmp_path)
        assert stranger.poll() is None
        stranger.kill()


def test_a_start_is_told_by_the_clock_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"pid": os.getpid(), "start": 1.0}
    began, wall = psutil.Process().create_time(), time.time
    assert supervisor._started(told) == pytest.approx(began, abs=2)
    monkeypatch.setattr(supervisor.time, "time", lambda: wall() - 3600)
    assert supervisor._started(told) == pytest.approx(began - 3600, abs=2)
    assert supervisor._started(told | {"pid": 0}) == 1.0
