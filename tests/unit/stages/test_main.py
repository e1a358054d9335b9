"""A stage as a child process ends with the process that started it."""

import subprocess
import sys
import time
from pathlib import Path

import psutil

CHILD = """
import time
from pipelines.stages.__main__ import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE,
                         start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_of_a_process_that_is_killed_does_not_work_on(tmp_path: Path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.02)
