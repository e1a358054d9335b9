"""The bounds against scipy's own bootstrap, closed forms and the truth."""

import math

import numpy as np
import pytest
from scipy import stats

from pipelines.evaluation.bootstrap import _COUNTS, bootstrap

ALL = np.s_[:, None]


def documents(count, seed=0, spread=1.0):
    """Numerators and denominators: lengths are lognormal, and so is what each byte takes."""
    random = np.random.default_rng(seed)
    sizes = np.exp(random.normal(8, spread, count)).round()
    return sizes * np.exp(random.normal(0, 0.3, count)), sizes


def everything(count):
    return np.ones((count, 1), bool)


def test_the_counts_of_a_byte_are_poissons():
    assert len(_COUNTS) == 256
    assert (_COUNTS.mean(), _COUNTS.var()) == (1, 1)
    assert stats.skew(_COUNTS) == pytest.approx(1, abs=0.02)
    expected = stats.poisson(1).pmf(np.arange(6))
    np.testing.assert_allclose(np.bincount(_COUNTS.astype(int)) / 256, expected, atol=0.005)


def test_values_are_ratios_of_sums():
    numerators, sizes = documents(50)
    groups = np.arange(50)[ALL] % 3 == np.arange(3)
    found = bootstrap(numerators, sizes, groups, resamples=10)
    expected = [numerators[k::3].sum() / sizes[k::3].sum() for k in range(3)]
    np.testing.assert_allclose(found.values, expected)


def test_percentiles_are_those_of_scipys_bootstrap():
    numerators, sizes = documents(200)
    found = bootstrap(numerators, sizes, everything(200))
    theirs = stats.bootstrap(
        (numerators, sizes),
        lambda n, d, axis: n.sum(axis) / d.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=10_000,
        batch=1000,
        rng=np.random.default_rng(0),
    ).bootstrap_distribution
    ours = found.values[0] + found.deviations[:, 0]
    assert ours.std() == pytest.approx(theirs.std(), rel=0.03)
    for share in (0.025, 0.05, 0.5, 0.95, 0.975):
        assert np.quantile(ours, share) == pytest.approx(
            np.quantile(theirs, share), abs=0.05 * theirs.std()
        )


def test_of_many_like_documents_the_bounds_are_those_of_students_t():
    random = np.random.default_rng(1)
    numerators = random.normal(2, 0.5, 400)
    lower, upper = bootstrap(numerators, np.ones(400), everything(400)).bounds(0.95)
    expected = stats.t.interval(0.9, 399, numerators.mean(), stats.sem(numerators))
    np.testing.assert_allclose([lower[0], upper[0]], expected, rtol=1.5e-3)


def test_groups_share_documents_and_change_nothing_of_each_other():
    numerators, sizes = documents(300)
    half = np.arange(300) < 150
    groups = np.stack([np.ones(300, bool), half, ~half, half], axis=1)
    found = bootstrap(numerators, sizes, groups)
    lower, upper = found.bounds(0.9)
    assert (lower[1], upper[1]) == (lower[3], upper[3])
    alone = bootstrap(numerators[half], sizes[half], everything(150)).bounds(0.9)
    width = (upper - lower)[1]
    assert [lower[1], upper[1]] == pytest.approx([alone[0][0], alone[1][0]], abs=0.05 * width)


def test_the_same_numbers_give_the_same_bounds_and_others_do_not():
    numerators, sizes = documents(100)
    first = bootstrap(numerators, sizes, everything(100))
    again = bootstrap(numerators, sizes, everything(100))
    assert np.array_equal(first.studentised, again.studentised)
    other = bootstrap(numerators * 2, sizes, everything(100))
    assert not np.allclose(first.studentised, other.studentised)


def test_bounds_widen_with_confidence():
    found = bootstrap(*documents(60), everything(60))
    wide = [upper - lower for lower, upper in (found.bounds(share) for share in (0.8, 0.95, 0.999))]
    assert wide[0] < wide[1] < wide[2]


def test_equal_documents_leave_no_doubt():
    lower, upper = bootstrap(np.full(20, 3.0), np.full(20, 2.0), everything(20)).bounds(0.95)
    assert (lower[0], upper[0]) == (1.5, 1.5)
    lower, upper = bootstrap(np.zeros(20), np.ones(20), everything(20)).bounds(0.95)
    assert (lower[0], upper[0]) == (0, 0)


def test_few_documents_have_no_bounds():
    for count in (1, 2, 4):
        lower, upper = bootstrap(*documents(count), everything(count)).bounds(0.95)
        assert not np.isfinite([lower[0], upper[0]]).any()
    lower, upper = bootstrap(*documents(5), everything(5)).bounds(0.95)
    assert np.isfinite([lower[0], upper[0]]).all()


def test_one_document_that_is_nearly_all_leaves_much_doubt():
    sizes = np.array([100.0] * 20 + [1e6])
    numerators = sizes * np.linspace(0.9, 1.1, 21)
    lower, upper = bootstrap(numerators, sizes, everything(21)).bounds(0.95)
    assert lower[0] < 1 < upper[0]  # the average of the many, from which the large one is far


@pytest.mark.parametrize("count", [10, 40, 160])
def test_the_truth_lies_within_the_bounds_as_often_as_said(count):
    truth, misses = math.exp(0.3**2 / 2), np.zeros(2)
    for seed in range(400):
        lower, upper = bootstrap(*documents(count, seed), everything(count), 1000).bounds(0.95)
        misses += lower[0] > truth, upper[0] < truth
    assert (misses <= 400 * 0.05 + 2.33 * math.sqrt(400 * 0.05 * 0.95)).all(), misses
