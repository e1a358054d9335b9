import threading

import httpx
import pytest

from pipelines.core.errors import UserError
from pipelines.registry import audit
from pipelines.registry.audit import Entry, TakenError
from pipelines.tracking import rest


@pytest.fixture
def run_id(name):
    return audit.create_run(name)


def entry(who, after=1):
    return Entry(
        action="promote",
        before=None,
        after=after,
        previous=None,
        who=who,
        when="2026-01-01T00:00:00+00:00",
        why="größer\nand better",
    )


def test_an_entry_is_read_back_as_it_was_written(run_id):
    trail = audit.read_run(run_id)
    assert (trail.entries, trail.last, trail.unfinished) == ([], None, False)
    trail = trail.add(entry("ada"))
    assert trail == audit.read_run(run_id)
    assert trail.unfinished
    trail = trail.finish()
    assert (trail.entries, trail.unfinished) == ([entry("ada")], False)


def test_nothing_that_is_written_can_be_overwritten_or_taken_away(run_id, mlflow_client):
    from mlflow.exceptions import MlflowException

    audit.read_run(run_id).add(entry("ada")).finish()
    with pytest.raises(MlflowException, match="Changing param values is not allowed"):
        mlflow_client.log_param(run_id, "00001", "{}")
    with pytest.raises(httpx.HTTPStatusError):
        rest.log_params(run_id, {"00001": "{}"})
    assert not rest.log_param_once(run_id, "00001.state", "void")
    assert audit.read_run(run_id).entries == [entry("ada")]


def test_of_many_writers_at_once_one_gets_each_number(run_id):
    trail, told, start = audit.read_run(run_id), [], threading.Barrier(8)

    def write(who):
        start.wait()
        try:
            trail.add(entry(who))
        except TakenError:
            told.append(who)

    writers = [threading.Thread(target=write, args=(f"writer {n}",)) for n in range(8)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    (found,) = audit.read_run(run_id).entries
    assert sorted([found.who, *told]) == [f"writer {n}" for n in range(8)]


def test_a_void_entry_is_no_entry_and_keeps_its_number(run_id):
    trail = audit.read_run(run_id).add(entry("ada")).finish(void=True)
    assert (trail.entries, trail.unfinished) == ([], False)
    trail = trail.add(entry("bob")).finish()
    assert [each.who for each in trail.entries] == ["bob"]
    assert {"00001", "00002"} <= {each["key"] for each in rest.run(run_id)["data"]["params"]}


def test_a_trail_that_was_deleted_is_said_to_be(run_id, mlflow_client):
    mlflow_client.delete_run(run_id)
    with pytest.raises(UserError, match=f"was deleted; .*restore --run-id {run_id}"):
        audit.read_run(run_id)
    with pytest.raises(UserError, match="is gone for good"):
        audit.read_run("0" * 32)
