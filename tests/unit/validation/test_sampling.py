"""The sample of texts: alike in every run, fair to lengths, and near-duplicates together."""

import numpy as np
import pytest

from pipelines.validation.frames import content_draws


def text(seed, words):
    numbers = np.random.default_rng(seed).integers(0, 10_000, words)
    return " ".join(f"w{number}" for number in numbers)


def test_a_draw_depends_on_the_text_alone():
    texts = [text(seed, 50) for seed in range(20)]
    draws = content_draws(texts)
    assert content_draws(texts[7:8])[0] == draws[7]
    assert content_draws([]).shape == (0,)
    assert len(set(draws)) == 20


@pytest.mark.parametrize("words", [1, 6, 300])
def test_draws_are_uniform_whatever_the_length(words):
    draws = content_draws([f"x{seed} {text(seed, words)}" for seed in range(2000)])
    counts, _ = np.histogram(draws, bins=10, range=(0, 1))
    assert counts.min() > 140
    assert counts.max() < 260


def test_near_duplicates_are_taken_or_left_together():
    originals = [text(seed, 400) for seed in range(500)]
    changed = [f"{original} and a new end" for original in originals]
    same = content_draws(originals) == content_draws(changed)
    assert same.mean() > 0.97


def test_texts_without_words_are_drawn_too():
    draws = content_draws(["-" * count for count in range(1, 400)])
    assert 0.4 < draws.mean() < 0.6
