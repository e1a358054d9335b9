"""Processes are known by what they inherited, and ended whoever their parent is."""

import os
import subprocess
from pathlib import Path

from pipelines.platform.supervisor import end_processes, processes_of


def test_an_orphan_of_ours_is_ended_and_a_stranger_is_not(tmp_path: Path) -> None:
    environment = os.environ | {"PENSTOCK_RUNTIME": str(tmp_path)}
    with subprocess.Popen(["sleep", "60"]) as stranger:
        # The shell ends at once; its background child goes on as an orphan in its own session.
        subprocess.run(["bash", "-c", "setsid sleep 60 >/dev/null &"], env=environment, check=True)
        ours = processes_of(tmp_path)
        assert len(ours) == 1
        end_processes(ours)
        assert not processes_of(tmp_path)
        assert stranger.poll() is None
        stranger.kill()
