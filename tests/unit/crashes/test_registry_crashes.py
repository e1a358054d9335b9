"""The champion is a whole model that was judged, whichever write of its registration was the last.

MLflow is a real server. A run's model is registered once.
"""

import itertools
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
from mlflow import MlflowClient

from pipelines.core.errors import UserError
from pipelines.registry import audit, promotion, registration, registry
from pipelines.registry.promotion import ChampionMovedError, promote, rollback
from pipelines.registry.registration import register
from pipelines.tracking import rest
from pipelines.tracking.tracked_run import MODEL_HASH_TAG
from tests.unit.crashes.crash_points import asked, crashes, every_point, meets

VERDICT = "penstock.verdict"
_numbers = itertools.count()


@pytest.fixture
def artifacts(mlflow_client):
    return Path(mlflow_client.get_experiment_by_name("unit").artifact_location)


@pytest.fixture(autouse=True)
def _versions_are_asked_for(monkeypatch):
    """In the server's own process MLflow's client asks the database itself for this one."""
    create = MlflowClient.create_model_version

    def create_version(*arguments, **options):
        asked()
        return create(*arguments, **options)

    monkeypatch.setattr(MlflowClient, "create_model_version", create_version)


def stage(name, folders, run_id):
    """As *register* does with a candidate that is better, in each of its tries."""
    champion = registry.champion(name)
    tags = {MODEL_HASH_TAG: f"hash of {run_id}", VERDICT: "promoted"}
    if champion and champion.run_id == run_id:
        return promote(champion, champion.version, "run", "better")
    version = register(folders, name, run_id, tags, "better")
    return promote(version, champion.version if champion else None, "run", "better")


def check(name):
    """What an alias names is whole and was judged; a run has one version. Returns the champion."""
    versions = registry.versions_of(name)
    assert len({each.run_id for each in versions}) == len(versions)
    for each in versions:
        if each.aliases:
            registry.verified_folder(each)
            assert each.tags[VERDICT] == "promoted"
    return next((each.version for each in versions if "champion" in each.aliases), None)


def moves(name):
    trail = registry.audit_trail(name)
    assert not trail.unfinished
    return [(each.action, each.before, each.after) for each in trail.entries]


def no_crash_spoils_the_champion(artifacts, folders, run_id, first=0):
    """At each write from the `first` on."""

    def at(stop):
        name = f"crashes-{next(_numbers)}"
        act = partial(stage, name, folders, run_id)
        died = crashes(artifacts, act, first + stop)
        assert check(name) in (None, 1)
        act()
        assert check(name) == 1
        assert moves(name) == [("promote", None, 1)]
        return died

    return every_point(at)


def test_every_crash_of_a_registration(home, artifacts, folders, mlflow_run):
    assert no_crash_spoils_the_champion(artifacts, folders, mlflow_run) > 10


def files_after_the_version(monkeypatch, tmp_path):
    late = []
    upload, create = MlflowClient.log_model_artifacts, MlflowClient.create_model_version

    def keep(client, model_id, folder):
        copy = tmp_path / f"kept-{next(_numbers)}"
        shutil.copytree(folder, copy)
        late.append((client, model_id, str(copy)))

    def create_first(*arguments, **options):
        create(*arguments, **options)
        upload(*late.pop())

    monkeypatch.setattr(MlflowClient, "log_model_artifacts", keep)
    monkeypatch.setattr(MlflowClient, "create_model_version", create_first)
    monkeypatch.setattr(registration, "_sync", lambda _: None)  # there is nothing yet


def done_before_the_alias_moves(monkeypatch, _):
    apply = promotion._apply
    monkeypatch.setattr(
        promotion, "_apply", lambda name, trail, entry: apply(name, trail.finish(), entry)
    )


@pytest.mark.parametrize(
    ("mutate", "first"), [(files_after_the_version, 10), (done_before_the_alias_moves, 18)]
)
def test_a_registration_in_another_order_is_caught(
    home, artifacts, folders, mlflow_run, monkeypatch, tmp_path, mutate, first
):
    mutate(monkeypatch, tmp_path)
    with pytest.raises((AssertionError, UserError)):
        no_crash_spoils_the_champion(artifacts, folders, mlflow_run, first)


@pytest.fixture
def source(home, folders, mlflow_run, monkeypatch, tmp_path):
    """The files of all versions, and two homes: no lock of one keeps the other waiting."""
    monkeypatch.setattr(promotion, "_lock", lambda _: tmp_path / f"lock-{threading.get_ident()}")
    return register(folders, "meetings", mlflow_run, {MODEL_HASH_TAG: "h"}, "").source


def no_meeting_moves_the_alias_twice(client, artifacts, source, other):
    """One promotes version 3 over 2; meanwhile another one promotes 4 over 2, or rolls back."""

    def told(act, *arguments):
        try:
            act(*arguments, 2, "somebody", "")
        except ChampionMovedError:
            lost.append(act)

    def at(stop):
        nonlocal lost
        name, lost = f"meetings-{next(_numbers)}", []
        rest.create_registered_model(name, {})
        for _ in range(4):
            model_id = source.removeprefix("models:/")
            client.create_model_version(name, source, model_id=model_id)
        versions = registry.show(name)[::-1]
        promote(versions[0], None, "ada", "")
        promote(versions[1], 1, "ada", "")
        theirs = (rollback, name) if other is rollback else (promote, versions[3])
        met = meets(
            artifacts,
            partial(told, promote, versions[2]),
            stop,
            partial(told, *theirs),
            blocked_s=30,
        )
        assert len(lost) == met  # of two one is told, and the other one's move is the only one
        last = moves(name)[2:]
        won = ("promote", 2, 3)
        if met and last != [won]:
            won = ("rollback", 2, 1) if other is rollback else ("promote", 2, 4)
        assert last == [won]
        aliases = registry.aliases_of(rest.registered_model(name))
        assert aliases == {"champion": won[2]} | ({"previous": 2} if won[2] > 2 else {})
        return met

    lost = []
    return every_point(at)


@pytest.mark.parametrize("other", [promote, rollback])
def test_every_meeting_of_two_who_move_the_alias(mlflow_client, artifacts, source, other):
    assert no_meeting_moves_the_alias_twice(mlflow_client, artifacts, source, other) >= 4


def test_an_alias_that_moves_before_its_claim_is_caught(
    mlflow_client, artifacts, source, monkeypatch
):
    add = audit.Trail.add

    def moved_first(self, entry):
        promotion.rest.set_alias(name_of[self.run_id], "champion", entry.after)
        return add(self, entry)

    name_of = {}
    open_trail = audit.open_trail

    def noted(name, tags):
        trail = open_trail(name, tags)
        name_of[trail.run_id] = name
        return trail

    monkeypatch.setattr(audit, "open_trail", noted)
    monkeypatch.setattr(audit.Trail, "add", moved_first)
    with pytest.raises(AssertionError):
        no_meeting_moves_the_alias_twice(mlflow_client, artifacts, source, promote)
