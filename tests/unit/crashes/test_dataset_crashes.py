"""A dataset version is whole or not there, whichever write of its makers was the last."""

import os
import shutil
import subprocess
import time
from contextlib import nullcontext

import pytest

from pipelines.core.errors import UnreachableError, UserError
from pipelines.datasets import dataset_publishing, versions
from pipelines.datasets.dataset_publishing import make
from pipelines.datasets.dvc_objects import ObjectStore
from pipelines.datasets.repository import DatasetRepository
from tests.unit.crashes.crash_points import crashes, every_point, meets
from tests.unit.datasets.dataset_workspace import make_workspace


@pytest.fixture
def home(tmp_path, monkeypatch):
    for variable in ("PENSTOCK_DATASETS_URL", "PENSTOCK_DATASETS_REMOTE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    # How long a maker waits that was not the quickest.
    monkeypatch.setattr(dataset_publishing.random, "uniform", lambda *_: 0.01)
    return tmp_path / "home"


@pytest.fixture
def workspaces(tmp_path):
    """Of two runs with other data."""
    return [make_workspace(tmp_path / name, f"the words of {name}\n" * 9) for name in ("a", "b")]


def check(home):
    """What is tagged is whole, numbered without a gap, and `main` ends at the newest of it."""
    found = versions.list_versions()
    assert [each.label for each in found] == [f"small@{n + 1}" for n in range(len(found))]
    assert [damage for each in found for damage in versions.verify(each)] == []
    repository = home / "datasets.git"
    if repository.is_dir():
        asked = ["git", "--git-dir", repository, "for-each-ref", "--format=%(objectname)"]
        main = subprocess.run([*asked, "refs/heads"], capture_output=True, text=True, check=True)
        assert main.stdout.split() == [each.git_revision for each in found[-1:]]
    return [each.run["dag_run_id"] for each in found]


def no_crash_leaves_half_a_version(home, workspaces, writes_to="", first=0):
    """At each write from the `first` on: of objects and calls of git, or of the latter alone."""
    one, two = workspaces

    def at(stop):
        shutil.rmtree(home, ignore_errors=True)
        died = crashes(home / writes_to, lambda: make(one), first + stop)
        before = check(home)
        assert before == ([] if died else ["a"])
        make((one, two)[stop % 2])  # the next one is the same run, or another one
        make(one)
        assert check(home) == (["a"] if stop % 2 == 0 else [*before, "b", "a"])
        return died

    return every_point(at)


def no_meeting_doubles_or_loses(home, workspaces):
    """At each call of git; objects are never written over, as they are named by their content.

    The makers are on two machines, where the lock of one does not keep the other out.
    """
    one, two = workspaces

    def at(stop):
        shutil.rmtree(home, ignore_errors=True)
        met = meets(home / "datasets.git", lambda: make(one), stop, lambda: make(two))
        assert sorted(check(home)) == (["a", "b"] if met else ["a"])
        return met

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatasetRepository, "_alone", lambda _: nullcontext())
        return every_point(at)


def test_every_crash_of_a_maker(home, workspaces):
    assert no_crash_leaves_half_a_version(home, workspaces) > 10


def test_every_meeting_of_two_makers(home, workspaces):
    assert no_meeting_doubles_or_loses(home, workspaces) > 10


def tagged_before_its_objects_are_there(monkeypatch):
    late = []
    push, publish = ObjectStore.push, DatasetRepository.publish
    monkeypatch.setattr(ObjectStore, "push", lambda *arguments: late.append(arguments))

    def publish_first(self, *arguments):
        tag = publish(self, *arguments)
        push(*late.pop())
        return tag

    monkeypatch.setattr(DatasetRepository, "publish", publish_first)


def tagged_before_main_moves(monkeypatch):
    push = DatasetRepository._push
    one_by_one = lambda self, main, tag: push(self, tag) and push(self, main)  # noqa: E731
    monkeypatch.setattr(DatasetRepository, "_push", one_by_one)


def main_moves_before_the_tag(monkeypatch):
    push = DatasetRepository._push
    one_by_one = lambda self, main, tag: push(self, main) and push(self, tag)  # noqa: E731
    monkeypatch.setattr(DatasetRepository, "_push", one_by_one)


def pushed_over_what_another_made(monkeypatch):
    push = DatasetRepository._push
    monkeypatch.setattr(DatasetRepository, "_push", lambda self, *refs: push(self, "-f", *refs))


@pytest.mark.parametrize(
    ("mutate", "run", "writes"),
    [
        (tagged_before_its_objects_are_there, no_crash_leaves_half_a_version, ()),
        (tagged_before_main_moves, no_crash_leaves_half_a_version, ("datasets.git", 12)),
        (main_moves_before_the_tag, no_crash_leaves_half_a_version, ("datasets.git", 12)),
        (pushed_over_what_another_made, no_meeting_doubles_or_loses, ()),
    ],
)
def test_a_version_in_another_order_is_caught(home, workspaces, monkeypatch, mutate, run, writes):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, UserError)):
        run(home, workspaces, *writes)


@pytest.mark.parametrize("age", [11, -3600])  # the clock was set back since then
@pytest.mark.parametrize(("state", "there"), [("prepared", ["a"]), ("committed", ["a", "b"])])
def test_a_git_that_is_killed_as_it_moves_the_refs_keeps_nobody_out(
    home, workspaces, state, there, age
):
    make(workspaces[0])
    repository = home / "datasets.git"
    hook = repository / "hooks/reference-transaction"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f'#!/bin/sh\n[ "$1" != {state} ] || kill -9 $PPID\n')
    hook.chmod(0o755)
    with pytest.raises(UnreachableError, match="can't be pushed"):
        make(workspaces[1])
    hook.unlink()
    assert check(home) == there
    for lock in repository.rglob("*.lock"):
        os.utime(lock, times=(time.time() - age,) * 2)
    make(workspaces[1])
    assert check(home) == ["a", "b"]
    assert {lock.name for lock in repository.rglob("*.lock")} == {"penstock.lock"}
