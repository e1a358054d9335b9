"""`penstock gc` on real workspaces; only Airflow's answers are said by the test."""

import fcntl
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.core.settings import Settings, load_settings
from pipelines.platform import garbage_collection
from pipelines.platform.airflow_api import DagRun
from pipelines.platform.garbage_collection import DAY, Rules
from pipelines.run.records import REFERENCES, TrainRecord
from tests.unit.stage_cache.cached_project import make_project, open_run

NOTHING_KEPT = Rules(days=1, failed_days=1, checkpoint_days=1, keep_last=0)


@dataclass
class Airflow:
    """What Airflow would say now, and what it does once a workspace is in the trash."""

    states: dict[str, str]
    meanwhile: dict[str, str] = field(default_factory=dict)

    def runs(self, *, live: bool = False) -> list[DagRun]:
        if live:
            self.states |= self.meanwhile
        runs = [DagRun("llm_pipeline", name, state) for name, state in self.states.items()]
        return [run for run in runs if run.live or not live]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


@pytest.fixture
def settings(project: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("PENSTOCK_HOME", str(project.parent / "home"))
    return load_settings()


def make_run(
    project: Path, name: str, *overrides: str, days: float = 10, source: str = "a"
) -> Path:
    """A workspace with a model and two checkpoints, whose last change was so long ago."""
    workspace = open_run(project, name, *overrides, source=source)
    model = {"model": "model", "model_hash": f"hash of {name}"}
    TrainRecord(**model, parameters=1, steps=1, tokens=1, metrics={}).write(workspace)
    for step in (10, 20):
        make_checkpoint(workspace / "checkpoints", step)
    for path in workspace.iterdir():
        os.utime(path, (time.time() - days * DAY,) * 2)
    return workspace


def make_checkpoint(folder: Path, step: int) -> None:
    checkpoint = folder / f"step-{step:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "__0_0.distcp").write_bytes(b"x" * 1000)
    (checkpoint / "COMPLETE").write_text("{}")
    (folder / "identity").write_text("of this run")


def collect(settings, airflow, *, rules=NOTHING_KEPT, aliased=(), delete=True):
    found = garbage_collection.collect(settings, airflow, rules, aliased, delete=delete)
    return {(each.what, each.name): each.bytes for each in found}


def names(settings) -> set[str]:
    return {path.name for path in settings.runs.iterdir()}


def test_a_dry_run_says_what_would_go_and_touches_nothing(project, settings):
    make_run(project, "old")
    make_run(project, "new", days=0)
    before = sorted(settings.runs.rglob("*"))
    found = collect(settings, Airflow({"old": "success"}), delete=False)
    assert list(found) == [("workspace", "old")]
    assert found["workspace", "old"] > 2000
    assert [path for path in sorted(settings.runs.rglob("*")) if path.name != ".stage.lock"] == [
        path for path in before if path.name != ".stage.lock"
    ]
    # What was told is what is done.
    assert collect(settings, Airflow({"old": "success"})) == found
    assert names(settings) == {"new"}


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_live_run_stays_however_old(project, settings, state):
    make_run(project, "old")
    assert collect(settings, Airflow({"old": state})) == {}
    assert collect(settings, Airflow({"ld": state})) == {}  # a part of the workspace's name
    assert names(settings) == {"old"}


def test_a_workspace_in_which_a_stage_runs_stays_though_airflow_knows_no_run(project, settings):
    workspace = make_run(project, "ad-hoc")
    with (workspace / ".stage.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert collect(settings, Airflow({})) == {}
    assert list(collect(settings, Airflow({}))) == [("workspace", "ad-hoc")]


def test_a_run_that_is_cleared_meanwhile_gets_its_workspace_back(project, settings):
    workspace = make_run(project, "old")
    content = sorted(path for path in workspace.rglob("*") if path.name != ".stage.lock")
    assert collect(settings, Airflow({"old": "failed"}, meanwhile={"old": "queued"})) == {}
    assert sorted(path for path in workspace.rglob("*") if path.name != ".stage.lock") == content


def test_checkpoints_go_before_the_workspace_does(project, settings):
    workspace = make_run(project, "old")
    rules = Rules(days=14, checkpoint_days=2, keep_last=0)
    assert list(collect(settings, Airflow({"old": "success"}), rules=rules)) == [
        ("checkpoints", "old")
    ]
    assert not list((workspace / "checkpoints").iterdir())
    assert (workspace / "outputs/train/record.json").exists()
    assert collect(settings, Airflow({"old": "success"}), rules=rules) == {}


def test_the_run_of_an_aliased_model_stays_whole(project, settings):
    make_run(project, "champion")
    make_run(project, "beaten")
    airflow = Airflow({"champion": "success", "beaten": "success"})
    assert list(collect(settings, airflow, aliased={"hash of champion"})) == [
        ("workspace", "beaten")
    ]
    assert names(settings) == {"champion"}


def test_checkpoints_that_lie_elsewhere_go_with_their_run_and_no_others(
    project, settings, tmp_path
):
    first, more = tmp_path / "checkpoint store", tmp_path / "second store"
    places = f"train.checkpoints={first}", f"train.more_checkpoints=[{{place: {more}}}]"
    old = make_run(project, "old", *places)
    for store in (first, more):
        for name in ("old", "other"):
            make_checkpoint(store / name, 10)
    size = collect(settings, Airflow({"old": "failed"}))["workspace", "old"]
    assert size > 4000
    assert not old.exists()
    for store in (first, more):
        assert not list((store / "old").iterdir())
        assert (store / "other/step-000010/COMPLETE").exists()


def test_what_first_models_said_goes_once_no_run_begins_with_it(project, settings):
    make_run(project, "new", days=0)
    folder = settings.runs / REFERENCES
    folder.mkdir()
    for name, days in (("old", 2), ("used", 0.5)):
        (folder / f"{name}.npy").write_bytes(bytes(1000))
        os.utime(folder / f"{name}.npy", (time.time() - days * DAY,) * 2)
    os.utime(folder, (time.time() - 9 * DAY,) * 2)
    assert collect(settings, Airflow({}), delete=False) == {("reference", "old.npy"): 1000}
    assert collect(settings, Airflow({})) == {("reference", "old.npy"): 1000}
    assert [path.name for path in folder.iterdir()] == ["used.npy"]


def test_what_a_call_that_was_cut_off_left_goes_with_the_next(project, settings):
    workspace = make_run(project, "old")
    trash = settings.runs / garbage_collection.TRASH
    trash.mkdir()
    workspace.rename(trash / "old")
    assert list(collect(settings, Airflow({}), delete=False)) == [("trash", "old")]
    assert list(collect(settings, Airflow({}))) == [("trash", "old")]
    assert names(settings) == set()


def test_what_is_left_of_runs_that_could_not_begin_goes_unless_they_wait(project, settings):
    for name in ("failed", "waits", ".killed.x1"):
        (settings.runs / name).mkdir(parents=True)
        (settings.runs / name / "error.json").write_text("{}")
        os.utime(settings.runs / name / "error.json", (time.time() - 10 * DAY,) * 2)
    (settings.runs / ".at-work.x2").mkdir()
    airflow = Airflow({"failed": "failed", "waits": "queued"})
    told = collect(settings, airflow, delete=False)
    assert told == collect(settings, airflow)
    assert set(told) == {("workspace", "failed"), ("workspace", ".killed.x1")}
    assert names(settings) == {"waits", ".at-work.x2"}


def test_an_export_whose_server_was_killed_goes(settings):
    old, new, served = (settings.home / "serving" / name for name in ("m-1-a", "m-1-b", "m-1-c"))
    for place in (old, new, served):
        (place / "m" / "1").mkdir(parents=True)
        (place / "m" / "1" / "model.safetensors").write_bytes(b"x" * 1000)
    lock = served / ".lock"
    lock.touch()
    for place in (old, served):
        os.utime(place, (time.time() - DAY,) * 2)
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert collect(settings, Airflow({}), delete=False) == {("serving", "m-1-a"): 1000}
        assert list(collect(settings, Airflow({}))) == [("serving", "m-1-a")]
    assert (old.exists(), new.exists(), served.exists()) == (False, True, True)


def test_a_workspace_of_an_older_release_is_no_error(project, settings):
    workspace = make_run(project, "old")
    (workspace / "params.yaml").write_text("name: x\nno_such_key: 1\n")
    os.utime(workspace / "params.yaml", (time.time() - 10 * DAY,) * 2)
    assert list(collect(settings, Airflow({"old": "failed"}))) == [("workspace", "old")]


def test_two_at_once_are_one_too_many(settings):
    settings.home.mkdir()
    with (settings.home / "gc.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another `penstock gc`"):
            collect(settings, Airflow({}))
