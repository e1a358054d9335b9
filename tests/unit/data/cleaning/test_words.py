import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.cleaning.words import (
    Kind,
    code_points,
    extend_ngrams,
    find_words,
    hash_ngrams,
    hash_words,
    kinds,
)

TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from("ab \n\u3000\u00a0é한"))


def words_and_hashes(text):
    codes = code_points(text)
    words = find_words(kinds(codes) == Kind.SPACE)
    found = [text[a:b] for a, b in zip(words.starts, words.ends, strict=True)]
    return found, hash_words(codes, words)


@given(TEXTS)
def test_words_are_what_split_gives(text):
    assert words_and_hashes(text)[0] == text.split()


@given(TEXTS)
def test_words_have_the_same_hash_where_they_are_the_same(text):
    words, hashes = words_and_hashes(text)
    assert len(set(words)) == len(set(hashes.tolist()))
    assert len({*zip(words, hashes.tolist(), strict=True)}) == len(set(words))


@pytest.mark.parametrize("before", [0, 1, 65_530, 65_536, 200_000])
def test_a_words_hash_does_not_depend_on_where_it_stands(before):
    text = "x " * (before // 2) + "straddling the segment"
    assert words_and_hashes(text)[1][-3:].tolist() == words_and_hashes(text[-22:])[1].tolist()


def test_a_word_longer_than_a_segment():
    words, hashes = words_and_hashes("a " + "b" * 100_000 + " c")
    assert len(words) == len(set(hashes.tolist())) == 3


def test_no_two_of_many_words_share_a_hash():
    words = [f"{stem}{n}" for n in range(20_000) for stem in ("a", "b", "ab", "ba", "é")]
    assert len(np.unique(words_and_hashes(" ".join(words))[1])) == len(words)


def test_hashes_are_the_same_in_every_process():
    hashes = words_and_hashes("the same Wörter 어디서나")[1].tolist()
    code = (
        "from tests.unit.data.cleaning.test_words import words_and_hashes as f;"
        "print(f('the same Wörter 어디서나')[1].tolist())"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert again.stdout.strip() == str(hashes)
    assert hashes[0] == 7634464684011675959


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30), st.integers(1, 15))
def test_ngrams_are_equal_where_their_words_are(values, n):
    hashes = np.array(values, np.uint64)
    ngrams = hash_ngrams(hashes, n)
    assert len(ngrams) == max(0, len(values) - n + 1)
    for start, ngram in enumerate(ngrams):
        assert ngram == hash_ngrams(hashes[start : start + n], n)[0]
    longer = hash_ngrams(hashes, n + 1)
    assert (extend_ngrams(ngrams[: len(longer)], hashes[n:]) == longer).all()


@given(st.characters())
def test_kinds_are_those_of_unicodes_categories(character):
    kind = Kind(int(kinds(code_points(character))[0]))
    category = unicodedata.category(character)
    assert (kind is Kind.SPACE) == (character.isspace() or category[0] == "Z")
    if kind in (Kind.LETTER, Kind.MARK, Kind.NUMBER):
        assert category[0] == kind.name[0]
    if kind is Kind.CONTROL:
        assert category in {"Cc", "Cn", "Co", "Cs"}


def test_han_characters_stand_alone():
    text = "中文 ab中c"
    codes = code_points(text)
    words = find_words(codes == ord(" "), codes > 0x4E00)
    found = [text[a:b] for a, b in zip(words.starts, words.ends, strict=True)]
    assert found == ["中", "文", "ab", "中", "c"]
