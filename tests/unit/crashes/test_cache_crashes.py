"""A cached result is whole, or is no result, whatever write of a commit or restore was the last."""

import itertools
import shutil

import pytest

from pipelines.stage_cache import dvc_cache
from tests.unit.crashes.crash_points import crashes, every_point
from tests.unit.stage_cache.cached_project import make_project, open_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two workspaces with the same key, and the cache that they share."""
    project = make_project(tmp_path_factory.mktemp("crashes"))
    return [open_run(project, name) for name in ("one", "two")], project.parent / "home/dvc-cache"


def run_stage(workspace):
    """Restore the result or make it; True where it was cached. It is whole in both cases."""
    made = workspace / "outputs/first/record.json"
    if not (cached := dvc_cache.restore(workspace, "first")):
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text("result")
        dvc_cache.commit(workspace, "first")
    assert [*made.parent.iterdir()] == [made]
    assert made.read_text() == "result"
    return cached


def empty(workspaces, cache):
    shutil.rmtree(cache, ignore_errors=True)
    for each in workspaces:
        shutil.rmtree(each / "outputs", ignore_errors=True)
        (each / "dvc.lock").unlink(missing_ok=True)


def no_crash_leaves_half_a_result(runs, first):
    """`first` prepares the cache; then a run of the stage dies, and the next one tries."""
    (one, two), cache = runs
    turns = itertools.cycle((one, two))  # the next one is the same run, or another one

    def at(stop):
        empty(*runs)
        first(two)
        died = crashes(cache.parent, lambda: run_stage(one), stop)
        run_stage(next(turns))
        return died

    return every_point(at)


def test_every_crash_of_a_commit(runs):
    assert no_crash_leaves_half_a_result(runs, lambda _: None) > 10


def test_every_crash_of_a_restore(runs):
    assert no_crash_leaves_half_a_result(runs, run_stage) > 5


def test_an_entry_that_is_believed_before_its_objects_are_there_is_caught(runs, monkeypatch):
    monkeypatch.setattr(dvc_cache, "_sound", lambda *_: True)
    with pytest.raises(Exception, match="does not exist"):
        no_crash_leaves_half_a_result(runs, lambda _: None)
