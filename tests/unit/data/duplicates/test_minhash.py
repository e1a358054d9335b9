import hashlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.data.duplicates import minhash
from pipelines.data.duplicates.minhash import Signer, band_keys, bands, similar, sketches

VOCABULARY = [f"word{i}" for i in range(5000)]


def text_of(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=count))


def jaccard(left: str, right: str, n: int = 5) -> float:
    sets = [
        {tuple(found[i : i + n]) for i in range(len(found) - n + 1)}
        for found in (left.split(), right.split())
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize("replaced", [1, 4, 10, 30])
def test_texts_agree_as_far_as_their_shingles_overlap(replaced: int) -> None:
    signer = Signer(5, 1024)
    text = text_of(0, 400)
    edited = text.split()
    for position in random.Random(1).sample(range(400), replaced):
        edited[position] = "other"
    left, right = signer.sign([text, " ".join(edited)])
    truth = jaccard(text, " ".join(edited))
    deviation = (truth * (1 - truth) / 1024) ** 0.5
    assert abs((left == right).mean() - truth) < 4 * deviation


@settings(max_examples=25)
@given(st.lists(st.text(alphabet="ab .가", max_size=30), max_size=12), st.integers(1, 40))
def test_a_signature_depends_on_its_text_alone(texts: list[str], chunk: int) -> None:
    signer = Signer(3, 16)
    expected = [signer.sign([text])[0].tolist() for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minhash, "_CHUNK_CHARACTERS", chunk)
        assert signer.sign(texts).tolist() == expected


@pytest.mark.parametrize(("ngram", "piece"), [(1, 100), (5, 100), (5, 999), (200, 5000)])
def test_a_long_text_signs_in_pieces_as_at_once(
    ngram: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer = Signer(ngram, 32)
    texts = [text_of(1, 1000), text_of(2, 50), text_of(3, 1000)]
    at_once = signer.sign(texts)
    monkeypatch.setattr(minhash, "_PIECE_CHARACTERS", piece)
    monkeypatch.setattr(minhash, "_CHUNK_CHARACTERS", piece)
    assert np.array_equal(signer.sign(texts), at_once)


def test_signatures_are_the_same_on_every_machine_and_for_ever() -> None:
    signatures = Signer(5, 128).sign([text_of(0, 300), "too short", "", "한국어와中文", "---"])
    keys = band_keys(signatures, 16, 8)
    content = signatures.astype("<u4").tobytes() + keys.astype("<u8").tobytes()
    assert hashlib.sha256(content).hexdigest() == (
        "32851987596d6bb5b3cdd5ed3cbd3a84d812f73363099f2bb2663cbc4a1d251b"
    )


def test_texts_without_words_resemble_only_themselves() -> None:
    dashes, stars, empty, again = sketches(Signer(5, 128).sign(["----", "* * *", "", "----"]))
    assert similar(dashes[None], again[None], 0.99).all()
    others = np.array([stars, empty, dashes])
    assert not similar(others, np.roll(others, 1, axis=0), 0.1).any()


def test_few_words_are_one_shingle() -> None:
    same, case, other = Signer(5, 128).sign(["two words", "Two words!", "two word"])
    assert np.array_equal(same, case)
    assert (same == other).mean() < 0.1


@pytest.mark.parametrize("jaccard", [0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("permutations", [64, 128, 256])
def test_bands_find_most_at_the_threshold_and_little_far_below(
    permutations: int, jaccard: float
) -> None:
    count, rows = bands(permutations, jaccard)

    def chance(similarity: float) -> float:
        return 1 - (1 - similarity**rows) ** count

    assert count * rows <= permutations
    assert chance(jaccard + 0.1) > 0.85
    assert chance(jaccard / 2) < 0.55


def test_the_default_bands() -> None:
    assert bands(128, 0.8) == (16, 8)


def test_texts_share_a_band_key_exactly_where_a_band_agrees() -> None:
    generator = np.random.default_rng(0)
    left = generator.integers(0, 3, (500, 12), dtype=np.uint32)
    right = generator.integers(0, 3, (500, 12), dtype=np.uint32)
    agree = (left.reshape(500, 4, 3) == right.reshape(500, 4, 3)).all(axis=2)
    assert agree.any()
    assert np.array_equal(band_keys(left, 4, 3) == band_keys(right, 4, 3), agree)
    # Equal values in different bands are different keys.
    keys = band_keys(np.ones((1, 12), np.uint32), 4, 3)
    assert len(np.unique(keys)) == 4


def test_unlike_signatures_agree_by_chance_only() -> None:
    signatures = Signer(5, 128).sign([text_of(i, 200) for i in range(200)])
    small = sketches(signatures)
    assert not similar(small, np.roll(small, 1, axis=0), 0.1).any()
    assert similar(small, small, 1.0).all()
