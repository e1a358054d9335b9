"""The turns of candidates, on a real MLflow: retries, races, and what counts as the same."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pipelines.core.errors import UserError
from pipelines.registry import comparisons, registry
from pipelines.registry.comparisons import part_of, take_turn
from pipelines.registry.promotion import promote
from pipelines.registry.registration import register
from pipelines.run.verdict import MOST_USES, Turn
from pipelines.tracking import rest
from pipelines.tracking.tracked_run import MODEL_HASH_TAG


@pytest.fixture
def champion(name, folders, mlflow_run):
    version = register(folders, name, mlflow_run, {MODEL_HASH_TAG: "aa"}, "")
    return promote(version, None, "ada", "the first")


def ids(first, last):
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in range(first, last)]


def params(champion):
    tags = registry.tags_of(rest.registered_model(champion.name))
    found = rest.run(tags["penstock.audit_run"])["data"]["params"]
    return sorted(each["key"] for each in found if each["key"].startswith("compared."))


def test_each_candidate_has_a_turn_and_keeps_it(champion):
    documents = ids(0, 80)
    assert take_turn(champion, "c1", documents) == Turn(number=1, uses=1)
    assert take_turn(champion, "c2", documents) == Turn(number=2, uses=2)
    assert take_turn(champion, "c1", documents[::-1]) == Turn(number=1, uses=1)  # a retry
    assert take_turn(champion, "c3", documents) == Turn(number=3, uses=3)
    assert take_turn(champion, "c2", documents) == Turn(number=2, uses=2)
    assert params(champion) == ["compared.00001", "compared.00002", "compared.00003"]


def test_another_champion_begins_at_one_and_finds_the_documents_as_worn(champion):
    documents = ids(0, 80)
    for candidate in ("c1", "c2"):
        take_turn(champion, candidate, documents)
    successor = replace(champion, version=2, tags={MODEL_HASH_TAG: "c2"})
    assert take_turn(successor, "c3", documents) == Turn(number=1, uses=3)
    again = replace(champion, version=3)  # a rollback, or the same content once more
    assert take_turn(again, "c3", documents) == Turn(number=3, uses=4)


def test_documents_are_the_same_ones_while_the_data_grow(champion):
    take_turn(champion, "c1", ids(0, 80))
    assert take_turn(champion, "c2", ids(0, 100)) == Turn(number=2, uses=2)
    assert take_turn(champion, "c3", ids(0, 500)) == Turn(number=3, uses=3)
    assert take_turn(champion, "c4", ids(1000, 1080)) == Turn(number=4, uses=1)


def test_a_candidate_on_other_documents_is_another_chance(champion):
    take_turn(champion, "c1", ids(0, 80))
    assert take_turn(champion, "c1", ids(0, 81)) == Turn(number=2, uses=2)
    assert take_turn(champion, "c1", ids(0, 80)) == Turn(number=1, uses=1)


def test_a_part_is_used_until_it_is_worn_out_and_then_the_next(champion):
    documents = ids(0, 160)
    turns = [take_turn(champion, f"c{number}", documents, parts=2) for number in range(41)]
    expected = [(part, uses) for part in (1, 2) for uses in range(1, MOST_USES + 1)]
    assert [(each.part, each.uses) for each in turns] == [*expected, (1, MOST_USES + 1)]
    assert [each.number for each in turns] == [*range(1, 42)]
    assert [bool(each.warning) for each in turns] == [False] * 40 + [True]
    assert take_turn(champion, "c3", documents, parts=2) == turns[3]  # a retry keeps its part
    assert "part 2 of 2 of the held-out documents used once" in str(turns[MOST_USES])


def test_a_part_keeps_its_documents_while_the_data_grow():
    assert {part_of(each, 3) for each in ids(0, 60)} == {1, 2, 3}
    parts = [sorted(each for each in ids(0, 80) if part_of(each, 3) == part) for part in (1, 2, 3)]
    assert sum(map(len, parts)) == 80
    assert min(map(len, parts)) > 15


def test_a_part_without_documents_is_passed_over(champion):
    (document,) = ids(5, 6)
    turn = take_turn(champion, "c1", [document], parts=4)
    assert (turn.part, turn.uses) == (part_of(document, 4), 1)


def test_of_many_at_once_each_has_a_turn_of_its_own(champion):
    documents = ids(0, 80)
    candidates = [f"c{number % 6}" for number in range(12)]  # each by two runs
    with ThreadPoolExecutor(len(candidates)) as pool:
        turns = list(pool.map(lambda each: take_turn(champion, each, documents), candidates))
    assert turns[:6] == turns[6:]
    assert sorted(each.number for each in turns[:6]) == [1, 2, 3, 4, 5, 6]
    assert len(params(champion)) == 6


def test_an_entry_whose_answer_is_lost_counts_once(champion, monkeypatch):
    log_param_once = rest.log_param_once

    def lost(*values):
        log_param_once(*values)
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(comparisons.rest, "log_param_once", lost)
        with pytest.raises(ConnectionError):
            take_turn(champion, "c1", ids(0, 80))
    assert take_turn(champion, "c2", ids(0, 80)).number == 2
    assert take_turn(champion, "c1", ids(0, 80)).number == 1


def test_the_audit_trail_is_not_touched(champion):
    before = registry.audit_trail(champion.name)
    take_turn(champion, "c1", ids(0, 80))
    assert registry.audit_trail(champion.name) == before


def test_a_trail_that_was_deleted_is_an_error_and_not_a_first_turn(champion, mlflow_client):
    take_turn(champion, "c1", ids(0, 80))
    mlflow_client.delete_run(registry.audit_trail(champion.name).run_id)
    with pytest.raises(UserError, match="was deleted; restore it there"):
        take_turn(champion, "c1", ids(0, 80))
