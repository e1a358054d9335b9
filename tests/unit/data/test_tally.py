from collections import Counter

import pytest

from pipelines.core.errors import UserError
from pipelines.data.normalize import drop
from pipelines.data.tally import Reject, Tally


def tally(kept: int = 0, malformed: int = 0, **dropped: int) -> Tally:
    result = Tally()
    for _ in range(kept):
        result.keep(4)
    for reason, count in dropped.items():
        for number in range(count):
            result.drop(drop(f"{number}", 5, reason), reason)
    for number in range(malformed):
        result.drop(drop(f"a.jsonl:{number + 1}", 5, "malformed", "not JSON"), "malformed")
    return result


def test_counts() -> None:
    counts = tally(kept=3, malformed=25, duplicate=2)
    assert counts.to_dict()["documents"] == {
        "in": 30,
        "kept": 3,
        "dropped": {"duplicate": 2, "malformed": 25},
    }
    assert counts.to_dict()["bytes"] == {"in": 3 * 4 + 27 * 5, "kept": 12}
    assert len(counts.to_dict()["malformed"]) == 20
    assert counts.malformed[0] == "a.jsonl:1: not JSON"


def test_tallies_of_blocks_add_up_in_order() -> None:
    parts = (tally(kept=2, binary=1), tally(malformed=25), tally(kept=3, binary=1))
    assert Tally.of(parts) == tally(kept=5, malformed=25, binary=2)


def test_what_turns_out_a_duplicate_was_not_kept() -> None:
    counts = tally(kept=5)
    counts.drop_kept(Counter(duplicate=2), Counter(duplicate=8))
    assert counts.to_dict()["documents"] == {"in": 5, "kept": 3, "dropped": {"duplicate": 2}}
    assert counts.to_dict()["bytes"] == {"in": 20, "kept": 12}


def test_the_first_rejects_of_each_reason_are_kept() -> None:
    def block(name: str) -> Tally:
        result = Tally()
        for number in range(15):
            for reason in ("empty", "length:too_short"):
                result.drop(drop(f"{name}:{number}", 5, reason), reason)
                result.add_sample(reason, Reject(f"{name}:{number}", ""))
        return result

    counts = Tally.of(map(block, "abc"))
    assert {reason: len(rejects) for reason, rejects in counts.rejects.items()} == {
        "empty": 20,
        "length:too_short": 20,
    }
    assert {reject.source[0] for reject in counts.rejects["empty"]} == {"a", "b"}
    assert not counts.wants_sample("empty")
    assert counts.wants_sample("binary")


def test_some_malformed_records_are_tolerated() -> None:
    tally(kept=99, malformed=1).check("x", 0.01)
    with pytest.raises(UserError, match=r"x: a\.jsonl:1: not JSON; 2 of 100 records are malformed"):
        tally(kept=98, malformed=2).check("x", 0.01)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (tally(), "x: nothing to train on: it holds no record"),
        (tally(empty=1), "x: nothing to train on: it is empty; give a file with text"),
        (tally(binary=1), "x: nothing to train on: it is binary, not text; give UTF-8 text"),
        (tally(invalid_utf8=1), "x: nothing to train on: it is not UTF-8; convert it"),
        (tally(empty=2, binary=1), "x: nothing to train on: of 3 documents, 1 binary, 2 empty"),
        (
            tally(**{"c4:curly": 1}),
            "x: nothing to train on: of 1 documents, 1 c4:curly; give other",
        ),
        (tally(kept=1, duplicate=4), "x: only 1 document is left of 5, 4 duplicate; train and"),
    ],
)
def test_too_little_is_one_line(counts: Tally, message: str) -> None:
    with pytest.raises(UserError) as raised:
        counts.check("x", 0.01)
    assert str(raised.value).startswith(message)
