"""A stage that works for too long ends itself, and a user may give it as much again."""

import subprocess
import sys

import pytest

from pipelines.core.errors import EXIT_USER_ERROR
from pipelines.run.logbook import Entry, note, read_logbook
from pipelines.stages.stage_process import user_error

STAGE = """
import sys
import time
from functools import partial
from pathlib import Path

from pipelines.stages.stage_process import keep_error
from pipelines.stages.stage_process import time_limit

workspace = Path.cwd()
keep = partial(keep_error, workspace, "train")
with time_limit(workspace, "train", float(sys.argv[1]) / 3600, keep):
    try:
        time.sleep(float(sys.argv[2]))
    except BaseException:
        print("interrupted")
print("done")
"""


@pytest.fixture
def stage(tmp_path):
    def run(limit, works):
        return subprocess.run(
            [sys.executable, "-c", STAGE, str(limit), str(works)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_the_whole_process_ends_with_one_line_for_the_person(stage, tmp_path):
    done = stage(limit=0.5, works=30)
    assert done.returncode == EXIT_USER_ERROR
    assert done.stdout == ""
    line = user_error(tmp_path, "train")
    assert "train reached its time limit, resources.max_stage_hours" in line
    assert [entry.kind for entry in read_logbook(tmp_path)] == ["time limit"]


def test_a_stage_that_ends_in_time_is_left_alone(stage, tmp_path):
    done = stage(limit=30, works=0.1)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert not read_logbook(tmp_path)


def test_earlier_tries_count_and_a_clear_gives_as_much_again(stage, tmp_path):
    (tmp_path / "usage.jsonl").write_text(
        '{"stage": "train", "event": "began", "time": 0, "workers": 1}\n'
        '{"stage": "train", "event": "failed", "time": 100}\n'
    )
    assert stage(limit=99, works=0.5).returncode == EXIT_USER_ERROR
    assert stage(limit=99, works=0.5).returncode == 0  # after a user cleared the task
    note(tmp_path, Entry(kind="time limit", key="other", stage="other", cause="", done=""))
    assert stage(limit=49, works=0.5).returncode == EXIT_USER_ERROR
    assert [entry.stage for entry in read_logbook(tmp_path)] == ["train", "other", "train"]
