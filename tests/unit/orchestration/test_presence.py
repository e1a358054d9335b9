"""Who is at work on a task."""

from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException

from pipelines.orchestration.task_liveness import task_process
from pipelines.run.logbook import read_logbook


def context(try_number):
    return {"ti": SimpleNamespace(task_id="train", map_index=-1, try_number=try_number)}


def test_a_process_that_ended_by_itself_is_no_loss(tmp_path):
    for try_number in (1, 2):
        with task_process(tmp_path, context(try_number)):
            pass
    assert read_logbook(tmp_path) == []


def test_a_process_that_was_killed_is_told_once_by_the_next_one(tmp_path):
    killed = task_process(tmp_path, context(1))
    killed.__enter__()
    for try_number in (2, 3):
        with task_process(tmp_path, context(try_number)):
            pass
    (entry,) = read_logbook(tmp_path)
    assert entry.kind == "task lost"
    assert "try 1" in entry.cause
    assert entry.done == "try 2 took over"


def test_without_a_workspace_there_is_no_other_try(tmp_path):
    removed = tmp_path / "removed"
    with (
        pytest.raises(AirflowFailException, match="removed: the run's workspace was removed"),
        task_process(removed, context(1)),
    ):
        pytest.fail("there is nothing to work in")
    assert not removed.exists()
