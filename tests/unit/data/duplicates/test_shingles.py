from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.duplicates.shingles import shingles, words

TEXTS = st.text(alphabet="aZé9 .\n-ß가나漢字かคÀ\U0001f600\U00020000", max_size=40)
ALONE = set("가나漢字かค\U00020000")


def words_by_loop(text: str) -> list[str]:
    found = []
    for kind, run in groupby(text.lower(), lambda c: "alone" if c in ALONE else c.isalnum()):
        if kind:
            letters = list(run)
            found += letters if kind == "alone" else ["".join(letters)]
    return found


def shingles_by_loop(text: str, n: int) -> list[tuple[str, ...]]:
    found = words_by_loop(text)
    whole = [tuple(found[i : i + n]) for i in range(len(found) - n + 1)]
    return whole or [tuple(found)] * bool(found)


def shingles_of(texts: list[str], n: int) -> list[list[int]]:
    hashes, offsets = shingles(*words(texts), n)
    return [part.tolist() for part in np.split(hashes, offsets[1:-1])] if texts else []


@given(st.lists(TEXTS, max_size=6), st.integers(1, 6))
def test_shingles_are_those_that_a_loop_over_words_finds(texts: list[str], n: int) -> None:
    expected = [shingles_by_loop(text, n) for text in texts]
    found = shingles_of(texts, n)
    assert [len(part) for part in found] == [len(part) for part in expected]
    names = {
        tuple(s): h for e, f in zip(expected, found, strict=True) for s, h in zip(e, f, strict=True)
    }
    # The same shingle has the same hash in every text, and no two share one.
    assert [[names[s] for s in part] for part in expected] == found
    assert len(set(names.values())) == len(names)


@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_a_text_has_the_same_shingles_in_any_batch(texts: list[str]) -> None:
    assert shingles_of(texts, 3) == [shingles_of([text], 3)[0] for text in texts]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("The quick, brown fox", "the QUICK brown -- fox!"),
        ("ÉCOLE d'été", "école d été"),
        ("한국어는 띄어쓰기가 다르다", "한국어는띄어쓰기가다르다"),
        ("中文。没有空格。", "中文没有空格"),
    ],
)
def test_case_punctuation_and_unreliable_spaces_do_not_count(left: str, right: str) -> None:
    assert shingles_of([left], 2) == shingles_of([right], 2)


def test_hashes_spread_over_many_words() -> None:
    text = " ".join(f"{i:x}" for i in range(200_000))
    hashes, _ = shingles(*words([text]), 1)
    assert len(np.unique(hashes)) == 200_000
    # Every one of the 64 bits is set in half of them.
    bits = np.unpackbits(hashes.view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 0.01
