"""Airflow's event log, as the platform's own writes it, in terms of a logbook."""

import json
import os
import time
from datetime import UTC, datetime
from typing import ClassVar

import pytest

from pipelines.core.settings import load_settings
from pipelines.orchestration.naming import live_recipes
from pipelines.platform import watch
from pipelines.platform.airflow_api import DagRun
from pipelines.platform.supervisor import Process
from pipelines.platform.watch import Decision, Watch, decisions, is_cleared_by
from pipelines.run.logbook import read_logbook
from pipelines.run.records import RUN_FILE


def event(name, extra, *, run="r", task=None):
    return {
        "event": name,
        "dag_id": "d",
        "run_id": run,
        "task_id": task,
        "extra": json.dumps(extra),
    }


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        (
            event("patch_task_instance", {"new_state": "failed", "method": "PATCH"}, task="train"),
            [Decision("d", "r", "train", "marked failed")],
        ),
        (
            event("patch_dag_run", {"state": "success", "method": "PATCH"}),
            [Decision("d", "r", "", "marked success")],
        ),
        (
            event(
                "post_clear_task_instances",
                {"dag_run_id": "r", "task_ids": ["train", ["evaluate", 2]], "dry_run": False},
            ),
            [Decision("d", "r", "train, evaluate", "cleared")],
        ),
        (
            event("clear_dag_run", {"dry_run": False}),
            [Decision("d", "r", "", "cleared")],
        ),
        (event("patch_task_instance", {"note": "well done"}, task="train"), []),
        (event("patch_dag_run", {"note": "well done"}), []),
        # A range of dates names no run.
        (event("post_clear_task_instances", {"start_date": "2026-01-01"}, run=None), []),
        (
            event(
                "bulk_task_instances",
                {
                    "actions": [
                        {
                            "action": "update",
                            "entities": [
                                {"task_id": "a", "dag_run_id": "r1", "new_state": "failed"},
                                {
                                    "task_id": "b",
                                    "dag_id": "other",
                                    "dag_run_id": "r2",
                                    "new_state": "success",
                                },
                            ],
                        },
                        {"action": "delete", "entities": ["c"]},
                    ]
                },
                run="~",
            ),
            [
                Decision("d", "r1", "a", "marked failed"),
                Decision("other", "r2", "b", "marked success"),
            ],
        ),
    ],
)
def test_what_a_user_decided(logged, expected):
    assert list(decisions(logged)) == expected


@pytest.mark.parametrize(
    ("asked", "hit"),
    [
        ({"task_ids": ["train"], "only_failed": False}, True),
        ({"task_ids": [["train", 2]], "only_failed": False}, True),
        ({"task_ids": [["train", 1]], "only_failed": False}, False),
        ({"task_ids": ["evaluate"], "only_failed": False}, False),
        ({"task_ids": ["train"], "only_failed": False, "prevent_running_task": True}, False),
        ({"task_ids": ["train"]}, False),  # by default only what failed
        ({"only_failed": False}, False),
    ],
)
def test_a_clear_hits_what_it_names(asked, hit):
    logged = event("post_clear_task_instances", asked | {"dag_run_id": "r", "dry_run": False})
    assert is_cleared_by(logged, "d", "r", "train", 2) is hit
    assert not is_cleared_by(logged, "d", "another", "train", 2)


class Parts:
    """The scheduler, as supervisord sees it."""

    pid, state, seconds = 1, "RUNNING", 3600.0

    def __init__(self, runtime):
        pass

    def processes(self):
        started = time.time() - Parts.seconds
        return {"scheduler": Process("scheduler", Parts.state, Parts.pid, started)}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.setattr(watch, "runtime_folder", lambda settings: tmp_path)
    monkeypatch.setattr(watch, "Supervisor", Parts)
    monkeypatch.setattr(Parts, "pid", 1)
    monkeypatch.setattr(Parts, "state", "RUNNING")
    monkeypatch.setattr(Parts, "seconds", 3600.0)
    return load_settings()


@pytest.fixture
def watched(settings):
    """A watch that has seen the scheduler, and a run that began since."""
    looks = Watch(settings)
    looks._note_replaced()
    return looks, begun(settings, "a run")


def begun(settings, name):
    workspace = settings.runs / name
    workspace.mkdir(parents=True)
    (workspace / RUN_FILE).write_text("{}")
    os.utime(workspace / RUN_FILE, (time.time() + 1,) * 2)
    return workspace


def test_a_part_that_soon_ends_again_and_again_is_told_of_once(settings, watched):
    looks, workspace = watched
    lives = ((2, "STARTING", 3), (2, "RUNNING", 15), (0, "BACKOFF", 0), (3, "RUNNING", 6))
    for Parts.pid, Parts.state, Parts.seconds in lives:
        looks._note_replaced()
    later = begun(settings, "a later run")
    looks._note_replaced()
    assert read_logbook(later) == []  # it had not begun as the part was lost
    Parts.seconds = 60
    looks._note_replaced()
    assert [entry.key for entry in read_logbook(workspace)] == ["scheduler-1"]
    Parts.pid = 4
    looks._note_replaced()
    assert [entry.key for entry in read_logbook(workspace)] == ["scheduler-1", "scheduler-3"]


def test_a_part_that_ends_again_before_airflow_has_answered_is_told_of_once(watched):
    """A busy machine takes long to find that the database is away."""
    looks, workspace = watched
    looks._asked = time.time() - 100
    for Parts.pid, Parts.seconds in ((2, 1), (2, 45), (3, 1), (3, 50)):
        looks._note_replaced()
    assert [entry.key for entry in read_logbook(workspace)] == ["scheduler-1"]
    looks._asked = time.time()
    looks._note_replaced()
    Parts.pid = 4
    looks._note_replaced()
    assert [entry.key for entry in read_logbook(workspace)] == ["scheduler-1", "scheduler-3"]


def test_a_run_that_began_since_the_last_look_is_told_of_a_lost_part(settings):
    old, new = settings.runs / "old", settings.runs / "new"
    for workspace in (old, new):
        workspace.mkdir(parents=True)
        (workspace / RUN_FILE).write_text("{}")
    os.utime(old / RUN_FILE, (time.time() - 60,) * 2)
    os.utime(new / RUN_FILE, (time.time() + 1,) * 2)
    looks = Watch(settings)
    looks._note_replaced()
    Parts.pid = 2
    looks._note_replaced()
    assert [entry.kind for entry in read_logbook(new)] == ["service lost"]
    assert read_logbook(old) == []


def test_the_dags_of_recipes_with_live_runs_are_noted_until_these_are_over(tmp_path, monkeypatch):
    class Airflow:
        """Knows the file of each DAG; one was deleted with its file."""

        live = ("llm_pipeline", "mine", "mine.refresh", "sweep", "own", "deleted")
        files: ClassVar = {
            "llm_pipeline": "llm_pipeline",
            "mine": "llm_pipeline",
            "mine.refresh": "data_refresh",
            "sweep": "llm_sweep",
            "own": "own",
        }
        asked: ClassVar = []

        def events(self, names, after):
            return []

        def runs(self, *, live):
            return (DagRun(dag_id, "r", "queued") for dag_id in self.live)

        def dag_file(self, dag_id):
            self.asked.append(dag_id)
            return self.files.get(dag_id)

    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    looks, airflow = Watch(load_settings()), Airflow()
    looks.look(lambda: airflow)
    assert live_recipes() == {"mine": "llm_pipeline", "mine.refresh": "data_refresh"}
    airflow.live = ("mine",)
    looks.look(lambda: airflow)
    assert live_recipes() == {"mine": "llm_pipeline"}
    assert airflow.asked.count("mine") == 1
    airflow.live = ()
    looks.look(lambda: airflow)
    assert live_recipes() == {}


WAITS = "; its next task waits until the clock of Airflow is past the run's start"


@pytest.mark.parametrize(
    ("shift", "how", "then"),
    [(-3600, "set back by 60 min", WAITS), (86400, "put on by 24 h", "")],
)
def test_a_clock_that_was_set_is_told_and_hides_no_decision(
    tmp_path, monkeypatch, shift, how, then
):
    class Airflow:
        """Has a decision of before the clock was set, and keeps since when it was asked."""

        after = ""
        when = datetime.now(UTC).isoformat()

        def events(self, names, after):
            self.after = after
            told = {"when": self.when, "event_log_id": 1, "owner": "admin"}
            return [
                event("patch_dag_run", {"state": "failed"}) | told | {"dag_id": "llm_pipeline"}
            ] * (after < self.when)

        def runs(self, *, live):
            return iter([DagRun("llm_pipeline", "r", "running")])

        def dag_file(self, dag_id):
            return dag_id

    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    settings, airflow, wall = load_settings(), Airflow(), time.time
    workspace = settings.runs / "r"
    workspace.mkdir(parents=True)
    (workspace / RUN_FILE).write_text("{}")
    looks = Watch(settings)
    looks._keep(after="2026-01-01T00:00:00+00:00")
    looks.look(lambda: airflow)
    monkeypatch.setattr(watch.time, "time", lambda: wall() + shift)
    looks.look(lambda: airflow)
    looks.look(lambda: airflow)
    decided, entry = read_logbook(workspace)
    assert decided.kind == "human decision"
    assert (entry.kind, entry.done) == ("clock", f"the run continued{then}")
    assert entry.cause.endswith(how)
    assert datetime.fromisoformat(airflow.after).timestamp() < watch.time.time()
