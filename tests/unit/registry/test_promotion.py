"""Who is champion, on a real MLflow: every crash, and every race."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from pipelines.core.errors import UserError
from pipelines.registry import registry
from pipelines.registry.promotion import ChampionMovedError, challenge, promote, rollback, withdraw
from pipelines.registry.registration import register
from pipelines.tracking import rest
from pipelines.tracking.tracked_run import MODEL_HASH_TAG
from tests.forked import exit_codes, forkserver, start
from tests.unit.tracking.openlineage_schema import file_transport, read_valid
from tests.unit.tracking.openlineage_schema import versions as versions_of


@pytest.fixture
def versions(name, folders, mlflow_run, mlflow_client):
    """Three versions of the same files, and none is champion."""
    first = register(folders, name, mlflow_run, {MODEL_HASH_TAG: "aa"}, "")
    model_id = first.source.removeprefix("models:/")
    for _ in range(2):
        mlflow_client.create_model_version(name, first.source, model_id=model_id)
    return registry.show(name)[::-1]


def state(name):
    """Champion, previous, challenger."""
    model = next(each for each in registry.list_models() if each.name == name)
    return model.champion, model.previous, model.challenger


def trail(name):
    entries = registry.audit_trail(name).entries
    return [(each.action, each.before, each.after) for each in entries]


def promote_all(versions):
    over = None
    for each in versions:
        promote(each, over, "ada", "better")
        over = each.version


def test_each_promotion_leaves_who_when_from_to_and_why(name, versions):
    promote(versions[0], None, "ada", "the first")
    promoted = promote(versions[1], 1, "run 7", "0.1 bits per byte better")
    assert promoted.aliases == ("champion",)
    assert state(name) == (2, 1, None)
    last = registry.audit_trail(name).last
    assert (last.action, last.before, last.after) == ("promote", 1, 2)
    assert (last.who, last.why) == ("run 7", "0.1 bits per byte better")
    assert last.when.endswith("+00:00")
    assert last.to_dict().keys() == {"action", "from", "to", "previous", "who", "when", "why"}


def test_a_second_call_for_the_champion_changes_nothing(name, versions):
    promote(versions[0], None, "ada", "")
    promote(versions[0], None, "ada", "")
    assert trail(name) == [("promote", None, 1)]


def test_a_promotion_over_a_champion_that_is_no_more_is_told_by_whom(name, versions):
    promote(versions[0], None, "ada", "")
    promote(versions[1], 1, "bob", "the better one")
    with pytest.raises(ChampionMovedError) as error:
        promote(versions[2], 1, "ada", "")
    assert "the champion is version 2 now, not version 1 (promote by bob, " in str(error.value)
    assert "the better one" in str(error.value)
    assert state(name) == (2, 1, None)


def test_each_move_of_the_alias_is_told_to_the_companys_catalogue(
    name, versions, tmp_path, monkeypatch
):
    file = tmp_path / "events.jsonl"
    for variable, value in file_transport(file).items():
        monkeypatch.setenv(variable, value)
    promote(versions[0], None, "ada", "")
    promote(versions[1], 1, "ada", "")
    promote(versions[1], 1, "ada", "")  # which changes nothing
    rollback(name, 2, "ada", "it rambles")
    ends = [each for each in read_valid(file) if each["eventType"] == "COMPLETE"]
    told = [(each["job"]["name"], *versions_of(each["outputs"]).items()) for each in ends]
    alias = f"model/{name}@champion"
    assert told == [
        (f"promote.{name}", (alias, "1")),
        (f"promote.{name}", (alias, "2")),
        (f"rollback.{name}", (alias, "1")),
    ]


def test_one_rollback_after_another_goes_further_back(name, versions):
    promote_all(versions)
    assert rollback(name, 3, "ada", "it rambles").version == 2
    assert state(name) == (2, 1, None)
    assert rollback(name, 2, "ada", "that, too").version == 1
    assert state(name) == (1, None, None)
    with pytest.raises(UserError, match="no champion before version 1"):
        rollback(name, 1, "ada", "")
    promote(versions[2], 1, "bob", "fixed elsewhere")
    assert state(name) == (3, 1, None)
    assert rollback(name, 3, "ada", "").version == 1


def test_of_two_who_roll_back_at_once_one_does(name, versions):
    promote_all(versions)
    rollback(name, 3, "ada", "it rambles")
    with pytest.raises(ChampionMovedError, match="rollback by ada"):
        rollback(name, 3, "bob", "it rambles")
    assert state(name)[0] == 2


def test_a_rollback_passes_over_a_version_that_was_deleted(name, versions, mlflow_client):
    promote_all(versions)
    mlflow_client.delete_model_version(name, "2")
    assert rollback(name, 3, "ada", "").version == 1


def test_a_rollback_to_files_that_somebody_was_at_is_refused(name, versions):
    promote_all(versions[:2])
    (registry.verified_folder(versions[0]) / "README.md").write_text("# evil")
    with pytest.raises(UserError, match=r"altered README\.md"):
        rollback(name, 2, "ada", "")
    assert state(name) == (2, 1, None)


class CutOffError(Exception):
    """The process died here."""


WRITES = ("log_param_once", "set_alias", "delete_alias")


def cut_off_after(monkeypatch, writes):
    """The next requests that write: so many arrive, then the process is gone."""
    left = [writes]

    def wrap(write):
        def counted(*arguments):
            if left[0] == 0:
                raise CutOffError
            left[0] -= 1
            return write(*arguments)

        return counted

    for each in WRITES:
        monkeypatch.setattr(rest, each, wrap(getattr(rest, each)))


# claim, previous, champion, challenger (which nothing names behind a rollback), done
@pytest.mark.parametrize(
    ("action", "writes"),
    [*(("promote", n) for n in range(5)), *(("rollback", n) for n in range(4))],
)
def test_a_crash_between_any_two_writes_is_completed_by_a_retry(
    name, versions, monkeypatch, action, writes
):
    promote_all(versions[:2])
    challenge(versions[2])

    def act():
        over = registry.champion(name).version
        if action == "promote":
            return promote(versions[2], over, "ada", "better")
        return rollback(name, over, "ada", "it rambles")

    with monkeypatch.context() as patch:
        cut_off_after(patch, writes)
        with pytest.raises(CutOffError):
            act()
    champion, previous, _ = state(name)
    assert champion in (1, 2, 3)  # a reader always finds one
    assert previous != 3
    done = {"promote": (3, 2, None), "rollback": (1, None, 3)}[action]
    assert act().version == done[0]
    assert state(name) == done
    moves = [("promote", None, 1), ("promote", 1, 2)]
    assert trail(name) == [*moves, ("promote", 2, 3) if action == "promote" else ("rollback", 2, 1)]
    assert not registry.audit_trail(name).unfinished


def test_a_move_that_was_cut_off_is_completed_by_the_next_one(name, versions, monkeypatch):
    promote(versions[0], None, "ada", "")
    with monkeypatch.context() as patch:
        cut_off_after(patch, 1)
        with pytest.raises(CutOffError):
            promote(versions[1], 1, "ada", "better")
    assert state(name)[0] == 1
    with pytest.raises(ChampionMovedError, match="version 2 now, not version 1"):
        promote(versions[2], 1, "bob", "")
    assert state(name) == (2, 1, None)


def test_a_move_to_a_version_that_was_deleted_meanwhile_is_void(
    name, versions, monkeypatch, mlflow_client
):
    promote(versions[0], None, "ada", "")
    with monkeypatch.context() as patch:
        cut_off_after(patch, 1)
        with pytest.raises(CutOffError):
            promote(versions[1], 1, "ada", "")
    mlflow_client.delete_model_version(name, "2")
    promote(versions[2], 1, "bob", "")
    assert trail(name) == [("promote", None, 1), ("promote", 1, 3)]
    assert state(name) == (3, 1, None)


def test_an_alias_moved_by_hand_is_believed_and_noted(name, versions, mlflow_client):
    promote(versions[0], None, "ada", "")
    mlflow_client.set_registered_model_alias(name, "champion", "2")
    promote(versions[2], 2, "ada", "")
    assert trail(name)[1:] == [("moved outside", 1, 2), ("promote", 2, 3)]
    assert state(name) == (3, 2, None)
    mlflow_client.delete_registered_model_alias(name, "champion")
    assert rollback(name, None, "ada", "").version == 3
    assert trail(name)[3:] == [("moved outside", 3, None), ("rollback", None, 3)]
    assert state(name) == (3, 2, None)


def test_a_model_of_another_tools_gets_a_trail(name, mlflow_client, versions):
    other = f"{name}-other"
    mlflow_client.create_registered_model(other)
    mlflow_client.create_model_version(other, "file:///nowhere")
    mlflow_client.set_registered_model_alias(other, "champion", "1")
    assert registry.audit_trail(other).entries == []
    with pytest.raises(UserError, match="had no champion before version 1"):
        rollback(other, 1, "ada", "")
    assert trail(other) == [("moved outside", None, 1)]


def test_the_challenger_is_who_a_user_is_asked_about(name, versions):
    promote(versions[0], None, "ada", "")
    assert challenge(versions[1]).aliases == ("challenger",)
    assert challenge(versions[2]).aliases == ("challenger",)  # one at a time: the newest
    assert withdraw(versions[1]).aliases == ()
    assert state(name) == (1, None, 3)
    assert promote(registry.find(name, "challenger"), 1, "ada", "approved").version == 3
    assert state(name) == (3, 1, None)


def test_a_reason_has_an_end(versions):
    with pytest.raises(UserError, match="2001 characters; 2000 at most"):
        promote(versions[0], None, "ada", "x" * 2001)


def test_a_new_alias_that_many_set_at_once_is_set(name, versions):
    numbers = [each.version for each in versions] * 2
    for alias in (f"alias-{n}" for n in range(5)):
        with ThreadPoolExecutor(len(numbers)) as pool:
            list(pool.map(partial(rest.set_alias, name, alias), numbers))
    assert sum(len(each.aliases) for each in registry.show(name)) == 5


def race(name, number, ready, told):
    """Of several processes that promote a version at once over version 1."""
    version = registry.find(name, number)
    ready.wait()
    try:
        promote(version, 1, f"racer {number}", "")
    except ChampionMovedError as error:
        told.put(str(error))
        sys.exit(3)


@pytest.mark.parametrize("shared_home", [True, False])
def test_of_promotions_at_once_one_wins_and_the_others_are_told(
    name, versions, tmp_path, home, shared_home
):
    promote(versions[0], None, "ada", "")
    racers, ready, told = [], forkserver().Barrier(2), forkserver().SimpleQueue()
    for each in versions[1:]:
        place = home if shared_home else tmp_path / f"home-{each.version}"
        variables = {
            "PENSTOCK_HOME": str(place),
            "PENSTOCK_SIGNING_KEY": str(home / "secrets" / "model-signing.pem"),
        }
        racers.append(start(race, name, str(each.version), ready, told, **variables))
    codes = exit_codes(racers)
    assert sorted(codes) == [0, 3]
    winner = 2 + codes.index(0)
    assert state(name) == (winner, 1, None)
    assert trail(name) == [("promote", None, 1), ("promote", 1, winner)]
    why = told.get()
    assert "racer" in why or "promotion is running" in why
