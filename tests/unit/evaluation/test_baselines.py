"""The n-gram is a probability, counts what it says, and xz is xz."""

import lzma

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.evaluation.baselines import (
    MAX_ORDER,
    ngram_bits_per_byte,
    ngram_probabilities,
    xz_bits_per_byte,
)

FEW_BYTES = st.lists(st.sampled_from(b"ab\x00\xff"), min_size=1, max_size=12).map(bytes)


def naive_probability(training: list[bytes], context: bytes, byte: int, order: int) -> float:
    """Witten and Bell's formula as it is written, over plain counts."""
    if order < 0:
        return 1 / 256
    shorter = naive_probability(training, context, byte, order - 1)
    suffix = context[len(context) - order :]
    padded = [bytes(MAX_ORDER) + document for document in training]
    followers = [
        text[end]
        for text in padded
        for end in range(MAX_ORDER, len(text))
        if text[end - order : end] == suffix
    ]
    if not followers:
        return shorter
    distinct = len(set(followers))
    return (followers.count(byte) + distinct * shorter) / (len(followers) + distinct)


@settings(max_examples=40)
@given(st.lists(FEW_BYTES, min_size=1, max_size=4), FEW_BYTES, st.integers(0, 5))
def test_probabilities_sum_to_one_over_the_next_byte(
    training: list[bytes], context: bytes, max_order: int
) -> None:
    held_out = [context + bytes([byte]) for byte in range(256)]
    for probability in ngram_probabilities(training, held_out, max_order):
        last = probability.reshape(256, -1)[:, -1]
        assert last.min() > 0
        assert last.sum() == pytest.approx(1.0, abs=1e-12)


@settings(max_examples=40)
@given(st.lists(FEW_BYTES, min_size=1, max_size=4), FEW_BYTES, st.integers(0, MAX_ORDER))
def test_equals_the_formula_over_plain_counts(
    training: list[bytes], document: bytes, max_order: int
) -> None:
    padded = bytes(MAX_ORDER) + document
    for order, got in enumerate(ngram_probabilities(training, [document], max_order)):
        expected = [
            naive_probability(training, padded[:end], padded[end], order)
            for end in range(MAX_ORDER, len(padded))
        ]
        np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_documents_are_apart() -> None:
    """What a document ends with tells nothing of the next one's beginning."""
    training = [b"abcabc", b"xyz", b"abd"]
    together = list(ngram_probabilities(training, [b"abc", b"xyz"], 3))[-1]
    apart = [list(ngram_probabilities(training, [d], 3))[-1] for d in (b"abc", b"xyz")]
    np.testing.assert_array_equal(together, np.concatenate(apart))


def test_longer_contexts_help_where_text_repeats() -> None:
    text = b"she sells sea shells on the sea shore; the shells she sells are sea shells. "
    bits = ngram_bits_per_byte([text * 200], [text * 5])
    assert bits[1] > bits[2] > bits[3] > bits[5] > 0


def test_bytes_never_seen_share_what_new_bytes_get() -> None:
    """After one "a" half of the mass is for new bytes, spread over all 256."""
    assert ngram_bits_per_byte([b"a"], [bytes(range(128, 256))], orders=(0,))[0] == 9.0


def test_an_order_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="max_order"):
        next(ngram_probabilities([b"a"], [b"a"], MAX_ORDER + 1))


def test_xz_whole_and_by_document() -> None:
    documents = [b"spam " * 100, b"eggs " * 100]
    got = xz_bits_per_byte(documents)
    best = 9 | lzma.PRESET_EXTREME
    assert got["xz"] == 8 * len(lzma.compress(b"".join(documents), preset=best)) / 1000
    by_document = sum(len(lzma.compress(document, preset=best)) for document in documents)
    assert got["xz-per-document"] == 8 * by_document / 1000
